//! One model before and after: a GPT in plain Burn (`plain.rs`), and what its user changes to make
//! it tensor-, sequence- and data-parallel (`parallel.rs`, lines marked `//*`). Both learn to count;
//! then `verify` checks that each layout of the second computes what one rank computes.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin bring_your_own
//! ```

mod parallel;
mod plain;

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, ReduceOp, World};
use burn_megatron::data::{DataError, Sample, Samples};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::nn::{BuildError, ModelBuilder, ParallelModule};
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron::train::LanguageModel;
use burn_megatron::verify::{Layout, Subject, VerifyOptions, verify};

use parallel::ParallelGpt;
use plain::GptConfig;

type AnyError = Box<dyn Error + Send + Sync>;

const STEPS: usize = 60;
const BATCH: usize = 8;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<(), AnyError> {
    let config = GptConfig {
        vocabulary: 40,
        context: 16,
        hidden: 32,
        heads: 4,
        layers: 2,
    };

    println!("plain Burn, one rank:    loss {:.4}", train_plain(&config));
    let losses = World::threads(4)?.run(|rank| {
        let layout = ParallelConfig::new().with_tensor(2).with_data(2);
        train_parallel(&config, &ParallelContext::new(&layout, &rank)?)
    })?;
    println!("tensor 2 x data 2:       loss {:.4}\n", losses[0]);

    let report = verify(
        &Counting(config),
        &Layout::standard(),
        &VerifyOptions::default(),
    )?;
    println!("{report}");
    if report.passes() {
        Ok(())
    } else {
        Err("a layout differs from one rank".into())
    }
}

fn train_plain(config: &GptConfig) -> f64 {
    let device = Device::flex().autodiff();
    let mut model = config.init(&device);
    let mut optimizer = BurnAdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.1)
        .init();
    let mut last = f64::NAN;
    for step in 0..STEPS {
        let (tokens, targets) = batch(config, step, 0..BATCH, &device);
        let loss = model.loss(tokens, targets);
        last = loss.clone().into_scalar::<f64>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    last
}

fn train_parallel(config: &GptConfig, groups: &ParallelContext) -> Result<f64, AnyError> {
    let device = Device::flex();
    let scope = ModelBuilder::new(groups, &device);
    let model = config.init_parallel(&scope)?;
    let mut ddp = DistributedDataParallel::new(scope.finish(model)?, groups)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let own = BATCH / groups.data().size();
    let first = groups.data().rank() * own;
    let mut last = f64::NAN;
    for step in 0..STEPS {
        let device = device.clone().autodiff();
        let (tokens, targets) = batch(config, step, first..first + own, &device);
        let count = (own * config.context) as u64;
        let loss = ddp.forward(&device, |model| model.losses(tokens, targets).sum());
        last = loss.clone().into_scalar::<f64>();
        ddp.backward(loss);
        let gradients = ddp.reduce(count)?;
        optimizer.step(LEARNING_RATE, &mut ddp, gradients);
    }
    let sum = groups.data().all_reduce_scalar(last, ReduceOp::Sum)?;
    Ok(sum / (BATCH * config.context) as f64)
}

/// Rows that count up from a number that depends on step and sample.
fn batch(
    config: &GptConfig,
    step: usize,
    samples: Range<usize>,
    device: &Device,
) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let shape = [samples.len(), config.context];
    let matrix = |shift: usize| {
        let row = |sample| {
            let first = 7 * step + 11 * sample + shift;
            (first..first + config.context).map(|i| (i % config.vocabulary) as i64)
        };
        let data = TensorData::new(samples.clone().flat_map(row).collect(), shape);
        Tensor::from_data(data, device)
    };
    (matrix(0), matrix(1))
}

/// Samples of a step of `verify`.
const SAMPLES: usize = 4;

/// The subject of `verify`: how to build the model, and its samples.
#[derive(Clone)]
struct Counting(GptConfig);

impl Subject for Counting {
    type Model = ParallelGpt;

    fn build(
        &self,
        groups: &ParallelContext,
        device: &Device,
    ) -> Result<ParallelModule<ParallelGpt>, BuildError> {
        let scope = ModelBuilder::with(groups, device, 0, DType::F64);
        let model = self.0.init_parallel(&scope)?;
        scope.finish(model)
    }

    fn samples(&self) -> usize {
        SAMPLES
    }

    fn data(&self, _: &ParallelContext) -> Arc<dyn Samples> {
        Arc::new(self.clone())
    }
}

/// Rows that count up from a number that depends on step and sample.
impl Samples for Counting {
    fn seq(&self) -> usize {
        self.0.context
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let row = |shift: usize| {
            let (step, sample) = (number as usize / SAMPLES, number as usize % SAMPLES);
            let first = 7 * step + 11 * sample + shift;
            let row = (first..first + self.0.context).map(|i| (i % self.0.vocabulary) as i32);
            row.collect()
        };
        Ok(Sample {
            tokens: row(0),
            targets: row(1),
            documents: vec![],
        })
    }
}
