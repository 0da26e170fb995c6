//! The same model built from parallel layers, with its training loop. The blocks are divided among pipeline stages.

use burn::module::Module;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor};
use burn_megatron::model::{StageBuilder, StageLayers};
use burn_megatron::nn::{BuildError, Norm, NormConfig, NormKind};
use burn_megatron::pipeline::engine::{Engine, Stage, StageOutput};
use burn_megatron::pipeline::{schedule_of, stages_on_rank};
use burn_megatron::prelude::*;

use super::data::{BATCH, Batch, HIDDEN, SEQ, loader};

const BLOCKS: usize = 4;
const MICRO_BATCHES: usize = 4;

#[derive(Module, Debug)]
struct Block {
    norm: Norm,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Block {
    fn new(builder: ModelBuilder) -> Result<Self, BuildError> {
        let norm = NormConfig::new(NormKind::Layer, HIDDEN, 1e-5);
        let up = ColumnParallelLinearConfig::new(HIDDEN, 4 * HIDDEN);
        let down = RowParallelLinearConfig::new(4 * HIDDEN, HIDDEN);
        Ok(Self {
            norm: norm.init(&builder.child("norm")),
            up: up.init(&builder.child("up"))?,
            down: down.init(&builder.child("down"))?,
        })
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let up = self.up.forward(self.norm.forward(x.clone()));
        x + self.down.forward(gelu(up))
    }
}

#[derive(Module, Debug)]
struct Model {
    blocks: StageLayers<Block>,
}

impl Model {
    fn new(ctx: &ParallelContext, device: &Device) -> Result<ParallelModule<Self>, AnyError> {
        let own = stages_on_rank(ctx.config(), ctx.pipeline().rank(), BLOCKS)?;
        let stages = StageBuilder::new(ModelBuilder::new(ctx, device), &own);
        let blocks = stages.layers("blocks", |_, builder| Block::new(builder))?;
        Ok(stages.finish(Self { blocks })?)
    }

    fn forward(&self, stage: usize, x: Tensor<3>) -> Tensor<3> {
        let blocks = self.blocks.of_stage(stage);
        blocks.fold(x, |x, (_, block)| block.forward(x))
    }
}

/// A step of this rank's stages.
struct Step<'a> {
    model: &'a Model,
    stages: usize,
    batch: Batch,
}

impl Stage for Step<'_> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        let rows = |x: &Tensor<3>| x.clone().chunk(MICRO_BATCHES, 0).swap_remove(micro_batch);
        let x = input.unwrap_or_else(|| rows(&self.batch.x));
        let y = self.model.forward(stage, x);
        if stage + 1 == self.stages {
            StageOutput::Loss(loss(y, rows(&self.batch.y)))
        } else {
            StageOutput::Activation(y)
        }
    }
}

/// Returns the mean squared error of each sample, summed: the wrapper divides by the samples of all ranks.
fn loss(y: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    (y - targets).square().sum() / (SEQ * HIDDEN) as f64
}

fn train_rank(ctx: &ParallelContext) -> Result<f64, AnyError> {
    let device = Device::flex();
    let mut ddp = DistributedDataParallel::new(Model::new(ctx, &device)?, ctx)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let (part, parts) = (ctx.data().rank(), ctx.data().size());
    let own = loader(512 * part / parts..512 * (part + 1) / parts);
    let own = own.to_device(&device.clone().autodiff());
    let schedule = schedule_of(ctx.config(), MICRO_BATCHES)?;
    let sink = ddp.sink();
    let engine = Engine::new(&schedule, ctx.pipeline(), &device, sink)?;
    let mut mean = 0.0;
    for _epoch in 0..4 {
        for batch in own.iter() {
            let run = engine.run(&Step {
                model: ddp.module(),
                stages: schedule.stages(),
                batch: batch?,
            })?;
            // The rank of the last stage has the loss; others have 0.
            mean = run.loss() / BATCH as f64;
            let gradients = ddp.reduce(BATCH as u64)?;
            optimizer.step(3e-3, &mut ddp, gradients);
        }
    }
    Ok(mean)
}

/// Trains on the four ranks of a layout. Returns the mean loss of the last batch, the largest one of the data ranks.
pub fn train(layout: &ParallelConfig) -> Result<f64, AnyError> {
    let losses =
        World::threads(4)?.run(|rank| train_rank(&ParallelContext::new(layout, &rank)?))?;
    Ok(losses.into_iter().fold(0.0, f64::max))
}
