use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::tensor::activation::gelu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron::nn::{BuildError, Norm, NormConfig, NormKind};
use burn_megatron::prelude::*;

const BLOCKS: usize = 4;
const SEQ: usize = 4;
const HIDDEN: usize = 16;
const BATCH: usize = 16;

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
    blocks: Vec<Block>,
}

impl Model {
    fn new(ctx: &ParallelContext, device: &Device) -> Result<ParallelModule<Self>, BuildError> {
        let builder = ModelBuilder::new(ctx, device);
        let block = |i| Block::new(builder.child("blocks").child(i));
        let blocks = (0..BLOCKS).map(block).collect::<Result<_, _>>()?;
        builder.finish(Self { blocks })
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.blocks.iter().fold(x, |x, block| block.forward(x))
    }
}

/// The mean squared error of each sample, summed: the wrapper divides by the samples of all ranks.
fn loss(y: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    (y - targets).square().sum() / (SEQ * HIDDEN) as f64
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
    let builder = DataLoaderBuilder::new(Reverse).batch_size(BATCH);
    builder.build(InMemDataset::new(items.collect()))
}

fn train(ctx: &ParallelContext) -> Result<f32, AnyError> {
    let device = Device::flex();
    let mut ddp = DistributedDataParallel::new(Model::new(ctx, &device)?, ctx)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let (part, parts) = (ctx.data().rank(), ctx.data().size());
    let own = loader(512 * part / parts..512 * (part + 1) / parts);
    let own = own.to_device(&device.clone().autodiff());
    for _epoch in 0..4 {
        for batch in own.iter() {
            let Batch { x, y } = batch?;
            let loss = ddp.forward(&device, |model| loss(model.forward(x), y));
            ddp.backward_last(loss);
            let gradients = ddp.reduce(BATCH as u64)?;
            optimizer.step(3e-3, &mut ddp, gradients);
        }
    }
    let Batch { x, y } = Reverse.batch((900..932).collect(), &device);
    Ok((loss(ddp.module().forward(x), y) / 32.0).into_scalar())
}

pub fn main() -> Result<(), AnyError> {
    let layout = ParallelConfig::new().with_tensor(2).with_data(2);
    let losses = World::threads(4)?.run(|rank| train(&ParallelContext::new(&layout, &rank)?))?;
    println!("held-out loss {:.4}", losses[0]);
    Ok(())
}
