use std::env;
use std::error::Error;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor, TensorData};
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::optim::AdamWConfig as ShardedAdamWConfig;
use burn_megatron_learner::MegatronStrategy;

type AnyError = Box<dyn Error + Send + Sync>;

const BLOCKS: usize = 4;
const SEQ: usize = 4;
const HIDDEN: usize = 16;

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: LayerNormConfig::new(HIDDEN).init(device),
            up: LinearConfig::new(HIDDEN, 4 * HIDDEN).init(device),
            down: LinearConfig::new(4 * HIDDEN, HIDDEN).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let up = self.up.forward(self.norm.forward(x.clone()));
        x + self.down.forward(gelu(up))
    }
}

#[derive(Module, Debug)]
struct Model {
    blocks: Vec<Block>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            blocks: (0..BLOCKS).map(|_| Block::new(device)).collect(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.blocks.iter().fold(x, |x, block| block.forward(x))
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        let (output, targets) = (self.forward(batch.x).flatten(1, 2), batch.y.flatten(1, 2));
        let loss = (output.clone() - targets.clone()).square().mean();
        RegressionOutput::new(loss, output, targets)
    }
}

/// `[batch, SEQ, HIDDEN]`: the model learns to reverse the features.
#[derive(Clone, Debug)]
struct Batch {
    x: Tensor<3>,
    y: Tensor<3>,
}

#[derive(Clone)]
struct Reverse;

impl Batcher<usize, Batch> for Reverse {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let (rows, size) = (items.len(), SEQ * HIDDEN);
        let number = |item: usize, i: usize| (0.7 * (size * item + i) as f32).sin();
        let numbers = items
            .iter()
            .flat_map(|item| (0..size).map(move |i| number(*item, i)));
        let data = TensorData::new(numbers.collect::<Vec<_>>(), [rows, SEQ, HIDDEN]);
        let x = Tensor::<3>::from_data(data, device);
        Batch {
            y: x.clone().flip([2]),
            x,
        }
    }
}

fn loader(items: std::ops::Range<usize>) -> Arc<dyn DataLoader<Batch>> {
    let builder = DataLoaderBuilder::new(Reverse).batch_size(16);
    builder.build(InMemDataset::new(items.collect()))
}

pub fn main() -> Result<(), AnyError> {
    let folder = env::temp_dir().join("one_to_many");
    let device = Device::flex().autodiff();
    let strategy = MegatronStrategy::from_env_or_threads(2)?
        .optimizer(ShardedAdamWConfig::default())
        .zero_stage(ZeroStage::Parameters);
    let training = SupervisedTraining::new(folder, loader(0..512), loader(900..932))
        .metrics((LossMetric::new(),))
        .with_training_strategy(strategy.into())
        .num_epochs(4);
    let learner = Learner::new(
        Model::new(&device),
        AdamWConfig::new().init(),
        ConstantLr::new(3e-3),
    );
    let result = training.launch(learner);
    if let Some(error) = result.error {
        return Err(error.to_string().into());
    }
    let held_out = Reverse.batch((900..932).collect(), &Device::flex());
    let loss = InferenceStep::step(&result.model, held_out).loss;
    println!("held-out loss {:.4}", loss.into_scalar::<f32>());
    Ok(())
}
