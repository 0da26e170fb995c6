//! One model before and after: a GPT in plain Burn (`plain.rs`), and what its user changes to make
//! it tensor-, sequence-, pipeline- and data-parallel (`parallel.rs`, lines marked `//*`). Both learn to
//! count; then `verify` checks that each layout of the second computes what one rank computes.
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin bring_your_own
//! ```

mod config;
mod parallel;
mod plain;

use std::error::Error;

use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::ModelConfig;
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_train::schedule::LrStyle;
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};
use burn_megatron_verify::{Layout, ModelSubject, VerifyOptions, verify};

use config::GptConfig;
use plain::Gpt;

type AnyError = Box<dyn Error + Send + Sync>;

const STEPS: usize = 60;
const BATCH: usize = 8;
const LEARNING_RATE: f64 = 3e-3;

fn main() -> Result<(), AnyError> {
    let config = GptConfig::default();
    let samples = Counting(config.clone());

    let plain = train_plain(&config, &samples)?;
    println!("plain Burn, one rank:    loss {plain:.4}");
    let losses = World::threads(4)?.run(|rank| {
        let layout = ParallelConfig::new().with_tensor(2).with_data(2);
        train_parallel(&config, &samples, &ParallelContext::new(&layout, &rank)?)
    })?;
    println!("tensor 2 x data 2:       loss {:.4}\n", losses[0]);

    let layouts = [Layout::standard(), Layout::pipelines(), Layout::sharded()].concat();
    let subject = ModelSubject::new(config);
    let report = verify(&subject, &layouts, &VerifyOptions::default())?;
    println!("{report}");
    if report.passes() {
        Ok(())
    } else {
        Err("a layout differs from one rank".into())
    }
}

/// Trains the plain model, and returns the loss of the last step.
fn train_plain(config: &GptConfig, samples: &Counting) -> Result<f64, AnyError> {
    let device = Device::flex().autodiff();
    let mut model = Gpt::new(config, &device);
    let mut optimizer = AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.1)
        .init();
    let mut last = f64::NAN;
    for step in 0..STEPS {
        let first = (step * BATCH) as u64;
        let batch = samples.batch(first..first + BATCH as u64)?;
        let matrix = |numbers| {
            let data = TensorData::new(numbers, [batch.rows, batch.seq]);
            Tensor::<2, Int>::from_data(data, &device)
        };
        let loss = model.loss(
            matrix(batch.tokens().to_vec()),
            matrix(batch.targets.clone()),
        );
        last = loss.clone().into_scalar::<f64>();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    Ok(last)
}

/// Trains the parallel model on one rank of a layout, and returns the loss of the last step.
fn train_parallel(
    config: &GptConfig,
    samples: &Counting,
    ctx: &ParallelContext,
) -> Result<f64, AnyError> {
    let device = Device::flex();
    let settings = TrainConfig {
        steps: STEPS,
        micro_batch_size: BATCH / ctx.data().size(),
        global_batch_size: BATCH,
        learning_rate: LEARNING_RATE,
        min_learning_rate: 0.0,
        warmup_steps: 0,
        schedule: LrStyle::Constant,
        clip: f64::INFINITY,
        ..TrainConfig::default()
    };
    let model = config.init(ctx, &device)?;
    let mut trainer = Trainer::new(model, ctx, &device, &settings)?;
    let mut last = f64::NAN;
    for _ in 0..STEPS {
        last = trainer.step(samples, &mut NoopObserver)?.loss;
    }
    Ok(last)
}

/// Rows that count up from a number that depends on the sample.
struct Counting(GptConfig);

impl Samples for Counting {
    fn seq(&self) -> usize {
        self.0.context
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let row = |first: usize| {
            let numbers = first..first + self.0.context;
            numbers.map(|i| (i % self.0.vocabulary) as i32).collect()
        };
        let first = 11 * number as usize;
        Ok(Sample {
            tokens: row(first),
            targets: row(first + 1),
            documents: vec![],
            padding: 0,
        })
    }
}
