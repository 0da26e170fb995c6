//! An image classifier with Burn's `Learner`: it learns which quadrant of an image is brighter than the others. The
//! line marked `//*` makes it run on many ranks. With the next two lines, weights, gradients and optimizer state are
//! sharded, and saved as shards.
//!
//! ```text
//! cargo run --release -p burn-megatron-learner --example image_classifier -- /tmp/images
//! ```
//!
//! A second run resumes from the last epoch of the first.

use std::env;
use std::error::Error;
use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::optim::AdamWConfig as BurnAdamW;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::optim::AdamWConfig;
use burn_megatron_learner::{MegatronStrategy, newest_epoch};

const SIDE: usize = 8;
const CHANNELS: usize = 8;

#[derive(Module, Debug)]
struct Classifier {
    stem: Conv2d,
    body: Conv2d,
    pool: AdaptiveAvgPool2d,
    head: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        let conv = |inputs| {
            let config = Conv2dConfig::new([inputs, CHANNELS], [3, 3]);
            config.with_padding(PaddingConfig2d::Same).init(device)
        };
        Self {
            stem: conv(1),
            body: conv(CHANNELS),
            pool: AdaptiveAvgPool2dConfig::new([2, 2]).init(),
            head: LinearConfig::new(4 * CHANNELS, 4).init(device),
        }
    }

    fn forward(&self, batch: Images) -> ClassificationOutput {
        let x = relu(self.stem.forward(batch.pixels));
        let x = self.pool.forward(relu(self.body.forward(x)));
        let output = self.head.forward(x.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        ClassificationOutput {
            loss: loss.forward(output.clone(), batch.labels.clone()),
            output,
            targets: batch.labels,
        }
    }
}

impl TrainStep for Classifier {
    type Input = Images;
    type Output = ClassificationOutput;

    fn step(&self, batch: Images) -> TrainOutput<ClassificationOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Classifier {
    type Input = Images;
    type Output = ClassificationOutput;

    fn step(&self, batch: Images) -> ClassificationOutput {
        self.forward(batch)
    }
}

/// Images `[batch, 1, side, side]`, and the indices of their brighter quadrants.
#[derive(Clone, Debug)]
struct Images {
    pixels: Tensor<4>,
    labels: Tensor<1, Int>,
}

#[derive(Clone, Debug)]
struct Image {
    pixels: Vec<f32>,
    label: usize,
}

impl Image {
    /// Creates noise with one brighter quadrant.
    fn new(number: usize) -> Self {
        // In [0, 1), different for each `i`.
        let noise = |i: usize| (43_758.547 * (12.9898 * i as f64).sin()).rem_euclid(1.0);
        let label = (4.0 * noise(7 * number + 3)) as usize;
        let pixel = |at: usize| {
            let (y, x) = (at / SIDE, at % SIDE);
            let quadrant = 2 * (2 * y / SIDE) + 2 * x / SIDE;
            let bright = if quadrant == label { 0.4 } else { 0.0 };
            (noise(number * SIDE * SIDE + at) + bright) as f32
        };
        let pixels = (0..SIDE * SIDE).map(pixel).collect();
        Self { pixels, label }
    }
}

#[derive(Clone)]
struct ImageBatcher;

impl Batcher<Image, Images> for ImageBatcher {
    fn batch(&self, items: Vec<Image>, device: &Device) -> Images {
        let pixels: Vec<f32> = items.iter().flat_map(|item| item.pixels.clone()).collect();
        let labels: Vec<i64> = items.iter().map(|item| item.label as i64).collect();
        let pixels = TensorData::new(pixels, [items.len(), 1, SIDE, SIDE]);
        Images {
            pixels: Tensor::from_data(pixels, device),
            labels: Tensor::from_data(&labels[..], device),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    run(&env::args().nth(1).ok_or("expected the folder of the run")?)
}

/// Trains from the start, or from the last epoch in the folder.
pub fn run(folder: &str) -> Result<(), Box<dyn Error>> {
    let shards = Path::new(folder).join("shards");
    let images = |numbers: std::ops::Range<usize>| numbers.map(Image::new).collect::<Vec<_>>();
    let loader = |images: Vec<Image>| {
        let builder = DataLoaderBuilder::new(ImageBatcher)
            .batch_size(16)
            .shuffle(3);
        builder.build(InMemDataset::new(images))
    };

    let strategy = MegatronStrategy::from_env_or_threads(2)?; //*
    let strategy = strategy
        .optimizer(AdamWConfig::default())
        .zero_stage(ZeroStage::Parameters);
    let strategy = strategy.checkpoints(&shards, 2);
    let mut training =
        SupervisedTraining::new(folder, loader(images(0..512)), loader(images(600..664)))
            .metrics((LossMetric::new(), AccuracyMetric::new()))
            .with_training_strategy(strategy.into()) //*
            .num_epochs(6)
            .summary();
    if let Some(epoch) = newest_epoch(&shards)? {
        training = training.checkpoint(epoch);
    }
    // Its optimizer is not called: the strategy has an optimizer.
    let learner = Learner::new(
        Classifier::new(&Device::flex().autodiff()),
        BurnAdamW::new().init(),
        ConstantLr::new(1e-2),
    );
    let result = training.launch(learner);
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }

    let test = ImageBatcher.batch(images(700..828), &Device::flex());
    let labels = test.labels.clone();
    let told = result
        .model
        .forward(test)
        .output
        .argmax(1)
        .squeeze_dim::<1>(1);
    let accuracy = told.equal(labels).float().mean().into_scalar::<f32>();
    println!("accuracy {accuracy:.3}");
    if accuracy > 0.9 {
        Ok(())
    } else {
        Err("expected an accuracy above 0.9".into())
    }
}
