//! A model of plain burn-nn layers, split into stages (`model.rs`) and run on a pipeline of 2 ranks: under
//! 1F1B, and interleaved with 2 stages per rank. Both must give the losses and the weights of the same
//! model on one rank in plain Burn.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin pipeline_stages
//! ```

mod model;

use std::cmp::max_by;
use std::collections::BTreeMap;
use std::error::Error;

use burn::module::Module;
use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{Device, FloatDType};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::{ParallelConfig, ScheduleKind};
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron::pipeline::engine::Engine;
use burn_megatron::pipeline::schedule_of;

use model::{Batch, MICRO_BATCHES, Model, Step, TOKENS, loss};

type AnyError = Box<dyn Error + Send + Sync>;

const STEPS: usize = 8;
const LEARNING_RATE: f64 = 3e-3;
const TOLERANCE: f64 = 1e-10;
/// Burn's AdamW rounds its settings to f32, and this library's AdamW does not. f32 represents these numbers exactly.
const BETA: f64 = 0.5;
const EPSILON: f64 = 1.0 / 67_108_864.0;

/// The losses of all steps, and the trained weights by path.
type Trained = (Vec<f64>, BTreeMap<String, Vec<f64>>);

fn weights(ddp: &DistributedDataParallel<Model>) -> BTreeMap<String, Vec<f64>> {
    let paths = ddp.table().entries().iter().map(|entry| entry.path.clone());
    let values = ddp.parameters().into_iter();
    let values = values.map(|values| values.into_data().iter().collect());
    paths.zip(values).collect()
}

/// Trains on a rank. The rank of the last stage returns the losses; other ranks return zeros.
fn train_rank(ctx: &ParallelContext) -> Result<Trained, AnyError> {
    let device = Device::flex();
    let mut ddp = DistributedDataParallel::new(Model::new(ctx, &device)?, ctx)?;
    let settings = AdamWConfig {
        beta1: BETA,
        beta2: BETA,
        epsilon: EPSILON,
        weight_decay: 0.0,
        ..AdamWConfig::default()
    };
    let mut optimizer = ParallelAdamW::new(&settings, &ddp)?;
    let schedule = schedule_of(ctx.config(), MICRO_BATCHES)?;
    let sink = ddp.sink();
    let engine = Engine::new(&schedule, ctx.pipeline(), &device, sink)?;
    let mut losses = vec![];
    for step in 0..STEPS {
        let run = engine.run(&Step {
            model: ddp.module(),
            stages: schedule.stages(),
            batch: Batch::new(step),
        })?;
        losses.push(run.loss() / TOKENS as f64);
        // Every stage processes all tokens of the samples of its replica.
        let gradients = ddp.reduce(TOKENS as u64)?;
        optimizer.step(LEARNING_RATE, &mut ddp, gradients);
    }
    Ok((losses, weights(&ddp)))
}

fn train_pipeline(layout: &ParallelConfig) -> Result<Trained, AnyError> {
    let world = World::threads(layout.pipeline)?;
    let ranks = world.run(|rank| train_rank(&ParallelContext::new(layout, &rank)?))?;
    let loss = |step: usize| ranks.iter().map(|(losses, _)| losses[step]).sum();
    let losses = (0..STEPS).map(loss).collect();
    let weights = ranks.into_iter().flat_map(|(_, weights)| weights);
    Ok((losses, weights.collect()))
}

/// Trains the same model in plain Burn.
fn train_alone() -> Result<Trained, AnyError> {
    let ctx = ParallelContext::single();
    let mut model = Model::new(&ctx, &Device::flex())?.module.train();
    let mut optimizer = BurnAdamWConfig::new()
        .with_beta_1(BETA as f32)
        .with_beta_2(BETA as f32)
        .with_epsilon(EPSILON as f32)
        .with_weight_decay(0.0)
        .init();
    let mut losses = vec![];
    for step in 0..STEPS {
        let batch = Batch::new(step);
        let mean = loss(model.forward(0, batch.inputs), batch.targets) / TOKENS as f64;
        losses.push(mean.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(mean.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    let model = ParallelModule::replicated(model.valid());
    Ok((losses, weights(&DistributedDataParallel::new(model, &ctx)?)))
}

fn main() -> Result<(), AnyError> {
    // Adam amplifies rounding errors of small gradients; in f64 a larger difference is a bug.
    Device::flex().configure(FloatDType::F64)?;
    let (losses, weights) = train_alone()?;
    let mut largest: f64 = 0.0;
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::Interleaved { group: None },
    ] {
        let layout = ParallelConfig::new().with_pipeline(2).with_schedule(kind);
        let (own_losses, own_weights) = train_pipeline(&layout)?;
        println!("{kind}");
        for (step, (own, one)) in own_losses.iter().zip(&losses).enumerate() {
            println!("  step {step}: {own:.9}, one rank {one:.9}");
        }
        assert!(own_weights.keys().eq(weights.keys()), "the paths differ");
        let one = losses.iter().chain(weights.values().flatten());
        let own = own_losses.iter().chain(own_weights.values().flatten());
        for (own, one) in own.zip(one) {
            // `total_cmp` orders NaN above all numbers.
            largest = max_by(largest, (own - one).abs(), f64::total_cmp);
        }
    }
    println!("largest difference of a loss or a weight: {largest:.1e}");
    if largest <= TOLERANCE {
        Ok(())
    } else {
        Err(format!("more than {TOLERANCE:e} away from one rank").into())
    }
}
