//! A plain Burn image classifier, trained on 4 ranks with all of its parameters sharded (ZeRO-3). It
//! learns which quadrant of an image is brighter than the others.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin zero3
//! ```

use std::error::Error;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, ZeroStage};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::{ParallelModule, recompute};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};

type AnyError = Box<dyn Error + Send + Sync>;

const RANKS: usize = 4;
const STEPS: usize = 60;
const BATCH: usize = 16;
const SIDE: usize = 8;
const CHANNELS: usize = 16;

#[derive(Module, Debug)]
struct Classifier {
    stem: Conv2d,
    blocks: Vec<Conv2d>,
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
            blocks: (0..6).map(|_| conv(CHANNELS)).collect(),
            head: LinearConfig::new(CHANNELS * SIDE * SIDE, 4).init(device),
        }
    }
}

// ANCHOR: wrap
impl Classifier {
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let Self { stem, blocks, head } = self.clone();
        let mut x = recompute(images, move |x| stem.forward(x));
        for block in blocks {
            x = recompute(x, move |x| x.clone() + relu(block.forward(x)));
        }
        recompute(x, move |x| head.forward(x.flatten(1, 3)))
    }
}

fn train(groups: &ParallelContext) -> Result<DistributedDataParallel<Classifier>, AnyError> {
    let device = Device::flex();
    let model = ParallelModule::replicated(Classifier::new(&device));
    let config = DataParallelConfig {
        zero_stage: ZeroStage::Parameters,
        ..DataParallelConfig::default()
    };
    let mut ddp = DistributedDataParallel::with(model, groups, &config)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    for step in 0..STEPS {
        let (images, labels) = batch(step * RANKS + groups.rank(), &device.clone().autodiff());
        let loss = ddp.forward(&device, |model| loss(model.forward(images), labels));
        let mean = loss.clone().into_scalar::<f32>() / BATCH as f32;
        ddp.backward_last(loss);
        let gradients = ddp.reduce(BATCH as u64)?;
        optimizer.step(1e-3, &mut ddp, gradients);
        if groups.rank() == 0 && (step % 10 == 0 || step + 1 == STEPS) {
            println!("step {step:2}  loss {mean:.4}");
        }
    }
    Ok(ddp)
}
// ANCHOR_END: wrap

/// Returns the loss summed over the images; the wrapper divides by the number of images of all ranks.
fn loss(scores: Tensor<2>, labels: Tensor<1, Int>) -> Tensor<1> {
    let mean = CrossEntropyLossConfig::new().init(&scores.device());
    mean.forward(scores, labels).mul_scalar(BATCH as f64)
}

/// Returns noise `[batch, 1, side, side]` with one brighter quadrant in each image, and the index of the quadrant.
fn batch(number: usize, device: &Device) -> (Tensor<4>, Tensor<1, Int>) {
    // In [0, 1), different for each `i`.
    let noise = |i: usize| (43_758.547 * (12.9898 * i as f64).sin()).rem_euclid(1.0);
    let image = |row: usize| number * BATCH + row;
    let label = |row: usize| (4.0 * noise(7 * image(row) + 3)) as usize;
    let pixel = |row: usize, at: usize| {
        let (y, x) = (at / SIDE, at % SIDE);
        let quadrant = 2 * (2 * y / SIDE) + 2 * x / SIDE;
        let bright = if quadrant == label(row) { 0.4 } else { 0.0 };
        noise(image(row) * SIDE * SIDE + at) + bright
    };
    let pixels = (0..BATCH).flat_map(|row| (0..SIDE * SIDE).map(move |at| (row, at)));
    let pixels: Vec<f32> = pixels.map(|(row, at)| pixel(row, at) as f32).collect();
    let labels: Vec<i64> = (0..BATCH).map(|row| label(row) as i64).collect();
    let images = TensorData::new(pixels, [BATCH, 1, SIDE, SIDE]);
    let images = Tensor::from_data(images, device);
    (images, Tensor::from_data(&labels[..], device))
}

/// Returns the accuracy on 8 held-out batches.
fn accuracy(model: &Classifier) -> f32 {
    let of_batch = |number| {
        let (images, labels) = batch(STEPS * RANKS + number, &Device::flex());
        let told = model.forward(images).argmax(1).squeeze_dim::<1>(1);
        told.equal(labels).float().mean().into_scalar::<f32>()
    };
    (0..8).map(of_batch).sum::<f32>() / 8.0
}

fn main() -> Result<(), AnyError> {
    let mesh = ParallelConfig::new().with_data(RANKS);
    let ranks = World::threads(RANKS)?.run(|rank| {
        let ddp = train(&ParallelContext::new(&mesh, &rank)?)?;
        let table = ddp.memory_plan()?.table(Some(&ddp.usage().peak()));
        Ok::<_, AnyError>((
            accuracy(ddp.module()),
            ddp.usage().peak_unsharded_units(),
            table,
        ))
    })?;
    let (accuracy, blocks, table) = &ranks[0];
    println!("accuracy {accuracy:.3}\n\n{table}\nblocks gathered at once: {blocks} of 8");
    match (*accuracy > 0.9, *blocks <= 2) {
        (false, _) => Err("the accuracy is below 0.9".into()),
        (_, false) => Err("more than two blocks were gathered at once".into()),
        (true, true) => Ok(()),
    }
}
