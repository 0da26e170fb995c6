//! Residual blocks of plain burn-nn layers, in pipeline stages.

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron::comm::ParallelContext;
use burn_megatron::model::{StageBuilder, StageLayers};
use burn_megatron::nn::{ModelBuilder, ParallelModule};
use burn_megatron::pipeline::engine::{Stage, StageOutput};
use burn_megatron::pipeline::stages_on_rank;

use crate::AnyError;

const BLOCKS: usize = 8;
const SEQ: usize = 8;
const HIDDEN: usize = 16;
const SAMPLES: usize = 8;
pub const MICRO_BATCHES: usize = 4;
pub const TOKENS: usize = SAMPLES * SEQ;

/// A plain layer, without ranks or stages.
#[derive(Module, Debug)]
pub struct Block {
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

/// The blocks of the stages on one rank.
#[derive(Module, Debug)]
pub struct Model {
    blocks: StageLayers<Block>,
}

impl Model {
    /// Creates the model in f64. The initial values of a parameter depend on its path, such as `blocks.5.up.weight`,
    /// but not on the layout.
    pub fn new(ctx: &ParallelContext, device: &Device) -> Result<ParallelModule<Self>, AnyError> {
        let own = stages_on_rank(ctx.config(), ctx.pipeline().rank(), BLOCKS)?;
        let stages = StageBuilder::new(ModelBuilder::with(ctx, device, 0, DType::F64), &own);
        let blocks = stages.layers("blocks", |_, builder| Ok(builder.replicated(Block::new)))?;
        Ok(stages.finish(Self { blocks })?)
    }

    /// Runs the blocks of a stage, from and to `[batch, seq, hidden]`.
    pub fn forward(&self, stage: usize, x: Tensor<3>) -> Tensor<3> {
        let blocks = self.blocks.of_stage(stage);
        blocks.fold(x, |x, (_, block)| block.forward(x))
    }
}

/// The data of a step, `[samples, seq, hidden]`.
pub struct Batch {
    pub inputs: Tensor<3>,
    pub targets: Tensor<3>,
}

impl Batch {
    /// Creates the batch of a step. The targets are the inputs with the features in reverse.
    pub fn new(step: usize) -> Self {
        let shape = [SAMPLES, SEQ, HIDDEN];
        let size = shape.iter().product::<usize>() as i64;
        let first = step as i64 * size;
        let device = Device::flex().autodiff();
        let numbers = Tensor::<1, Int>::arange(first..first + size, &device);
        let inputs = (numbers.float() * 0.7).sin().reshape(shape);
        Self {
            targets: inputs.clone().flip([2]),
            inputs,
        }
    }
}

/// Returns the summed squared error: the data-parallel wrapper divides by the number of tokens.
pub fn loss(y: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    (y - targets).powi_scalar(2).sum()
}

/// A step of the stages on one rank.
pub struct Step<'a> {
    pub model: &'a Model,
    pub stages: usize,
    pub batch: Batch,
}

impl Stage for Step<'_> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        // Every rank has the batch, so only activations are sent.
        let rows = |x: &Tensor<3>| x.clone().chunk(MICRO_BATCHES, 0).swap_remove(micro_batch);
        let x = input.unwrap_or_else(|| rows(&self.batch.inputs));
        let y = self.model.forward(stage, x);
        if stage + 1 == self.stages {
            StageOutput::Loss(loss(y, rows(&self.batch.targets)))
        } else {
            StageOutput::Activation(y)
        }
    }
}
