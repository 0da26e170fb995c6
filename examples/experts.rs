//! A custom model whose MLP is replaced by a mixture of experts, trained with its experts on 1, 2 and 4 ranks. It
//! learns a function of the plane that differs in each of 16 squares.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin experts
//! ```

use std::error::Error;
use std::f64::consts::TAU;

use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::moe::{MoeMlp, MoeMlpConfig, RouterConfig};
use burn_megatron::nn::{Activation, BuildError, ModelBuilder, ParallelModule};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};

type AnyError = Box<dyn Error + Send + Sync>;

const STEPS: usize = 150;
/// The number of points per step, over all ranks.
const POINTS: usize = 128;
const HIDDEN: usize = 16;

// ANCHOR: model
#[derive(Module, Debug)]
struct Model {
    input: Linear,
    norm: LayerNorm,
    moe: MoeMlp, // was: up: Linear, down: Linear
    output: Linear,
}

impl Model {
    fn new(ctx: &ParallelContext, device: &Device) -> Result<ParallelModule<Self>, BuildError> {
        let builder = ModelBuilder::new(ctx, device);
        let linear = |name, input, output| {
            let config = LinearConfig::new(input, output);
            let builder = builder.child(name);
            builder.replicated(|device| config.init(device))
        };
        let norm = LayerNormConfig::new(HIDDEN);
        // Two of eight experts for each point.
        let router = RouterConfig::new(HIDDEN, 8, 2);
        let moe = MoeMlpConfig::new(router, 2 * HIDDEN, Activation::SwiGlu);
        let model = Self {
            input: linear("input", 2, HIDDEN),
            norm: builder.child("norm").replicated(|device| norm.init(device)),
            moe: moe.init(&builder.child("moe"))?,
            output: linear("output", HIDDEN, 1),
        };
        builder.finish(model)
    }

    /// Maps points `[batch, points, 2]` to values `[batch, points, 1]`.
    fn forward(&self, points: Tensor<3>) -> Tensor<3> {
        let x = self.input.forward(points);
        let x = x.clone() + self.moe.forward(self.norm.forward(x));
        self.output.forward(x)
    }
}
// ANCHOR_END: model

/// Trains on a rank, and returns the summed squared errors of this rank's points in each step.
fn train(ctx: &ParallelContext) -> Result<Vec<f64>, AnyError> {
    let device = Device::flex();
    let mut ddp = DistributedDataParallel::new(Model::new(ctx, &device)?, ctx)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let own = POINTS / ctx.world().size();
    let mut losses = vec![];
    for step in 0..STEPS {
        let first = step * POINTS + ctx.rank() * own;
        let (points, targets) = batch(first, own, &device.clone().autodiff());
        let loss = ddp.forward(&device, |model| {
            (model.forward(points) - targets).square().sum()
        });
        losses.push(loss.clone().into_scalar::<f32>().into());
        ddp.backward_last(loss);
        // The gradients are divided by the points of all ranks.
        let gradients = ddp.reduce(own as u64)?;
        optimizer.step(1e-2, &mut ddp, gradients);
    }
    Ok(losses)
}

/// Returns points `[1, count, 2]` in the square from -1 to 1, and the values at these points, `[1, count, 1]`.
fn batch(first: usize, count: usize, device: &Device) -> (Tensor<3>, Tensor<3>) {
    // In [-1, 1), different for each `i`.
    let noise = |i: usize| 2.0 * (43_758.547 * (12.9898 * i as f64).sin()).rem_euclid(1.0) - 1.0;
    let points: Vec<_> = (2 * first..2 * (first + count)).map(noise).collect();
    let value = |point: &[f64]| {
        let square = |x: f64| ((x + 1.0) * 2.0).floor();
        let phase = square(point[0]) + 4.0 * square(point[1]);
        (TAU * phase / 16.0 + 2.0 * point[0]).sin()
    };
    let values: Vec<f64> = points.chunks(2).map(value).collect();
    let tensor = |values: Vec<f64>, width: usize| {
        let data = TensorData::new(values, [1, count, width]);
        Tensor::from_data(data, (device, DType::F32))
    };
    (tensor(points, 2), tensor(values, 1))
}

/// Returns the mean loss of each step, with the experts split over `expert` of 4 ranks, or on 1 rank.
fn losses(ranks: usize, expert: usize) -> Result<Vec<f64>, AnyError> {
    let layout = ParallelConfig::new().with_data(ranks).with_expert(expert);
    let all = World::threads(ranks)?.run(|rank| train(&ParallelContext::new(&layout, &rank)?))?;
    let mean = |step: usize| all.iter().map(|losses| losses[step]).sum::<f64>() / POINTS as f64;
    Ok((0..STEPS).map(mean).collect())
}

fn main() -> Result<(), AnyError> {
    let one = losses(1, 1)?;
    println!("one rank: loss {:.4} to {:.4}", one[0], one[STEPS - 1]);
    for expert in [2, 4] {
        let found = losses(4, expert)?;
        let pairs = found.iter().zip(&one);
        let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("4 ranks, experts on {expert}: losses at most {apart:.1e} apart");
        if apart.is_nan() || apart > 1e-3 {
            return Err("the losses differ from those of one rank".into());
        }
    }
    if one[STEPS - 1] < 0.2 * one[0] {
        Ok(())
    } else {
        Err("the loss did not fall below a fifth".into())
    }
}
