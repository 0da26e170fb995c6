//! A model of Burn's layers, which Burn's `Learner` trains.

use std::env;

use burn::data::dataloader::batcher::Batcher;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron_learner::MegatronStrategy;

use super::AnyError;
use super::data::{Batch, HIDDEN, Reverse, loader};

const BLOCKS: usize = 4;

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
pub struct Model {
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

/// Trains on the ranks of a strategy of this library, or on one device with Burn's strategy. Returns the loss on
/// held-out samples.
pub fn train(strategy: Option<MegatronStrategy<Model>>) -> Result<f64, AnyError> {
    let folder = env::temp_dir().join("one_to_many");
    let device = Device::flex().autodiff();
    let mut training = SupervisedTraining::new(folder, loader(0..512), loader(900..932))
        .metrics((LossMetric::new(),))
        .num_epochs(4);
    if let Some(strategy) = strategy {
        training = training.with_training_strategy(strategy.into());
    }
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
    Ok(loss.into_scalar::<f32>().into())
}
