//! A model of plain burn-nn layers, split into stages and run on a pipeline of 2 ranks: under 1F1B,
//! and interleaved with 2 stages per rank. Both must give the losses and the weights of the same
//! model on one rank in plain Burn.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin pipeline_stages
//! ```

use std::cmp::max_by;
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::activation::gelu;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::ParallelModule;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron::pipeline::engine::{Engine, Stage, StageOutput};
use burn_megatron::pipeline::schedule::{Schedule, ScheduleConfig, generate};

type AnyError = Box<dyn Error + Send + Sync>;

const BLOCKS: usize = 8;
const SEQ: usize = 8;
const HIDDEN: usize = 16;
const SAMPLES: usize = 8;
const TOKENS: usize = SAMPLES * SEQ;
const STEPS: usize = 8;
const LEARNING_RATE: f64 = 3e-3;
const TOLERANCE: f64 = 1e-10;
/// Burn's AdamW rounds its settings to f32, ours does not; these are numbers that f32 holds.
const BETA: f64 = 0.5;
const EPSILON: f64 = 1.0 / 67_108_864.0;
const RANKS: usize = 2;
const MICRO_BATCHES: usize = 4;

/// A plain layer, without ranks or stages.
#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

fn forward(blocks: &[Block], x: Tensor<3>) -> Tensor<3> {
    blocks.iter().fold(x, |x, block| {
        let up = block.up.forward(block.norm.forward(x.clone()));
        x + block.down.forward(gelu(up))
    })
}

/// The summed squared error; the data-parallel wrapper divides by the number of tokens.
fn loss(y: Tensor<3>, targets: Tensor<3>) -> Tensor<1> {
    (y - targets).powi_scalar(2).sum()
}

/// Inputs `[samples, seq, hidden]`, and as targets the same with the features in reverse.
fn batch(step: usize, samples: Range<usize>) -> (Tensor<3>, Tensor<3>) {
    let first = |sample| ((step * SAMPLES + sample) * SEQ * HIDDEN) as i64;
    let device = Device::flex().autodiff();
    let numbers = Tensor::<1, Int>::arange(first(samples.start)..first(samples.end), &device);
    let x = numbers.float() * 0.7;
    let x = x.sin().reshape([samples.len(), SEQ, HIDDEN]);
    (x.clone(), x.flip([2]))
}

/// The stages of one rank in one step, by their numbers.
struct Stages<'a> {
    blocks: BTreeMap<usize, &'a [Block]>,
    last: usize,
    step: usize,
}

impl Stage for Stages<'_> {
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput {
        // The number of the micro-batch says which samples these are, so that the stage that needs
        // inputs or targets gets them by itself, and only activations are sent.
        let size = SAMPLES / MICRO_BATCHES;
        let samples = micro_batch * size..(micro_batch + 1) * size;
        let (inputs, targets) = batch(self.step, samples);
        let y = forward(self.blocks[&stage], input.unwrap_or(inputs));
        if stage == self.last {
            StageOutput::Loss(loss(y, targets))
        } else {
            StageOutput::Activation(y)
        }
    }
}

/// The sum of the losses that this rank has seen in each step, and its final weights by stage.
type RankOutcome = (Vec<f64>, BTreeMap<usize, Vec<f64>>);

fn train_rank(
    model: &[Block],
    schedule: &Schedule,
    groups: &ParallelContext,
) -> Result<RankOutcome, AnyError> {
    // Any split works; here all stages are equal. A rank builds the blocks of its own stages only.
    let all: Vec<&[Block]> = model.chunks(BLOCKS / schedule.stages()).collect();
    let numbers = schedule.stages_of(groups.pipeline().rank());
    let stages: Vec<Vec<Block>> = numbers.iter().map(|stage| all[*stage].to_vec()).collect();

    let mut ddp = DistributedDataParallel::new(ParallelModule::replicated(stages), groups)?;
    let settings = AdamWConfig {
        beta1: BETA,
        beta2: BETA,
        epsilon: EPSILON,
        weight_decay: 0.0,
        ..AdamWConfig::default()
    };
    let mut optimizer = ParallelAdamW::new(&settings, &ddp)?;
    let sink = ddp.sink();
    let engine = Engine::new(schedule, groups.pipeline(), &Device::flex(), &*sink)?;
    let mut losses = vec![];
    for step in 0..STEPS {
        let blocks = ddp.module().iter().map(Vec::as_slice);
        let run = engine.run(&Stages {
            blocks: numbers.iter().copied().zip(blocks).collect(),
            last: schedule.stages() - 1,
            step,
        })?;
        losses.push(run.loss);
        // Every stage sees all tokens of the samples of its replica.
        let gradients = ddp.reduce(TOKENS as u64)?;
        optimizer.step(LEARNING_RATE, &mut ddp, gradients);
    }
    let trained = ddp.to_module();
    let weights = numbers.into_iter().zip(trained.iter().map(weights));
    Ok((losses, weights.collect()))
}

/// The losses of all steps, and then all weights in the order of the stages.
fn train_pipeline(model: &[Block], schedule: &Schedule) -> Result<Vec<f64>, AnyError> {
    let ranks = World::threads(RANKS)?.run(|rank| {
        let layout = ParallelConfig::new().with_pipeline(RANKS);
        train_rank(model, schedule, &ParallelContext::new(&layout, &rank)?)
    })?;
    // The rank of the last stage has the loss, the others have zero.
    let loss = |step: usize| ranks.iter().map(|rank| rank.0[step]).sum::<f64>() / TOKENS as f64;
    let mut all: Vec<f64> = (0..STEPS).map(loss).collect();
    let by_stage: BTreeMap<_, _> = ranks.into_iter().flat_map(|(_, weights)| weights).collect();
    all.extend(by_stage.into_values().flatten());
    Ok(all)
}

/// The same in plain Burn.
fn train_alone(mut model: Vec<Block>) -> Vec<f64> {
    let mut optimizer = BurnAdamWConfig::new()
        .with_beta_1(BETA as f32)
        .with_beta_2(BETA as f32)
        .with_epsilon(EPSILON as f32)
        .with_weight_decay(0.0)
        .init();
    let mut losses = vec![];
    for step in 0..STEPS {
        let (inputs, targets) = batch(step, 0..SAMPLES);
        let mean = loss(forward(&model, inputs), targets) / TOKENS as f64;
        losses.push(mean.clone().into_scalar::<f64>());
        let gradients = GradientsParams::from_grads(mean.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    [losses, weights(&model)].concat()
}

fn weights(blocks: &Vec<Block>) -> Vec<f64> {
    struct Collect(Vec<f64>);
    impl ModuleVisitor for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.extend(param.val().into_data().iter::<f64>());
        }
    }
    let mut all = Collect(vec![]);
    blocks.visit(&mut all);
    all.0
}

fn main() -> Result<(), AnyError> {
    // Adam amplifies rounding errors of small gradients; in f64 a larger difference is a bug.
    Device::flex().configure(FloatDType::F64)?;
    Device::flex().seed(0);
    let device = Device::flex().autodiff();
    let block = |_| Block {
        norm: LayerNormConfig::new(HIDDEN).init(&device),
        up: LinearConfig::new(HIDDEN, 4 * HIDDEN).init(&device),
        down: LinearConfig::new(4 * HIDDEN, HIDDEN).init(&device),
    };
    let model: Vec<Block> = (0..BLOCKS).map(block).collect();

    let one = train_alone(model.clone());
    let mut largest: f64 = 0.0;
    for kind in ["1f1b", "interleaved"] {
        let schedule = generate(&ScheduleConfig::new(kind.parse()?, RANKS, MICRO_BATCHES))?;
        let all = train_pipeline(&model, &schedule)?;
        println!("{kind}, {} stages", schedule.stages());
        for step in 0..STEPS {
            println!("  step {step}: {:.9}, one rank {:.9}", all[step], one[step]);
        }
        assert_eq!(all.len(), one.len(), "each weight on exactly one rank");
        for (a, b) in all.iter().zip(&one) {
            // In this order NaN is larger than all numbers.
            largest = max_by(largest, (a - b).abs(), f64::total_cmp);
        }
    }
    println!("largest difference of a loss or a weight: {largest:.1e}");
    if largest <= TOLERANCE {
        Ok(())
    } else {
        Err(format!("more than {TOLERANCE:e} away from one rank").into())
    }
}
