//! Measures the cost and the speedup of parallelism on the cores of one machine, as paired timings.
//!
//! ```text
//! cargo bench -p burn-megatron-tests
//! ```
//!
//! A GPT of width 256 trains on the text of this repository. Each variant runs the same steps (forward, backward,
//! reduction, AdamW; f32) after some warm-up steps. The variants alternate, so that other load affects all of them.
//! Ratios are computed within each round, and their median is reported.

#[path = "../../examples/bring_your_own/plain.rs"]
mod plain;

/// The sizes that `plain.rs` uses.
mod config {
    pub struct GptConfig {
        pub vocabulary: usize,
        pub context: usize,
        pub hidden: usize,
        pub heads: usize,
        pub layers: usize,
    }
}

use std::error::Error;
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use burn::optim::{AdamWConfig as BurnAdamWConfig, GradientsParams};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron::comm::{ParallelContext, World};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::mesh::ParallelConfig;
use burn_megatron::model::{LanguageModel, ModelConfig};
use burn_megatron::nn::Activation;
use burn_megatron::optim::{AdamWConfig, ParallelAdamW};
use burn_megatron_data::{Samples, TextData, TextSamples};
use burn_megatron_models::TransformerConfig;

type AnyError = Box<dyn Error + Send + Sync>;

/// Runs the training step with this index.
type Step<'a> = Box<dyn FnMut(usize) -> Result<(), AnyError> + 'a>;

const HIDDEN: usize = 256;
const HEADS: usize = 4;
const LAYERS: usize = 4;
const CONTEXT: usize = 128;
const VOCABULARY: usize = 256;
const BATCH: usize = 8;
const ROUNDS: usize = 5;
const WARM_UP: usize = 10;
const STEPS: usize = 10;
const LEARNING_RATE: f64 = 2e-3;

/// A benchmarked variant. `layout` is (tensor, data, sequence parallel), or `None` for the plain Burn model.
#[derive(Clone, Copy)]
struct Variant {
    name: &'static str,
    layout: Option<(usize, usize, bool)>,
    threads: usize,
}

const PLAIN: Variant = Variant {
    name: "plain Burn, 1 thread",
    layout: None,
    threads: 1,
};
const PLAIN_2: Variant = Variant {
    name: "plain Burn, 2 threads",
    layout: None,
    threads: 2,
};
const DEGREE_1: Variant = Variant {
    name: "parallel layers, 1 rank, 1 thread",
    layout: Some((1, 1, false)),
    threads: 1,
};
const TWO_THREADS: Variant = Variant {
    name: "parallel layers, 1 rank, 2 threads",
    layout: Some((1, 1, false)),
    threads: 2,
};
const DATA_2: Variant = Variant {
    name: "data 2, 1 thread each",
    layout: Some((1, 2, false)),
    threads: 1,
};
const TENSOR_2: Variant = Variant {
    name: "tensor 2, 1 thread each",
    layout: Some((2, 1, false)),
    threads: 1,
};
const SEQUENCE_2: Variant = Variant {
    name: "tensor 2, sequence parallel, 1 thread each",
    layout: Some((2, 1, true)),
    threads: 1,
};

fn main() -> Result<(), AnyError> {
    // `cargo test --benches` only checks that the benchmark runs.
    let (rounds, steps) = if std::env::args().any(|argument| argument == "--bench") {
        (ROUNDS, STEPS)
    } else {
        (1, 1)
    };
    let cores = std::thread::available_parallelism()?.get();
    println!(
        "GPT of {LAYERS} layers, hidden {HIDDEN}, {BATCH} samples of {CONTEXT} tokens per step, f32; \
         {cores} cores; {rounds} rounds of {steps} steps each\n"
    );
    let variants = [
        PLAIN,
        DEGREE_1,
        PLAIN_2,
        TWO_THREADS,
        DATA_2,
        TENSOR_2,
        SEQUENCE_2,
    ];
    let text = TextData::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))?;
    let sampler = text.samples(CONTEXT, 1)?;
    let mut seconds = vec![vec![]; variants.len()];
    for _ in 0..rounds {
        for (variant, seconds) in variants.iter().zip(&mut seconds) {
            seconds.push(variant.run(steps, &sampler)?);
        }
    }
    for (variant, seconds) in variants.iter().zip(&seconds) {
        let tokens = (BATCH * CONTEXT * steps) as f64;
        let per_second = min_median_max(seconds.iter().map(|seconds| tokens / seconds));
        println!(
            "{:<44} {:>7.0} tokens/s  ({:.0} to {:.0})",
            variant.name, per_second[1], per_second[0], per_second[2]
        );
    }
    println!();
    let ratio =
        |a: usize, b: usize| min_median_max(seconds[a].iter().zip(&seconds[b]).map(|(a, b)| a / b));
    for (what, a, b) in [
        (
            "time, parallel layers at degree 1 / plain Burn, 1 thread",
            1,
            0,
        ),
        (
            "time, parallel layers at degree 1 / plain Burn, 2 threads",
            3,
            2,
        ),
        ("tokens/s, data 2 / one rank with 2 threads", 3, 4),
        ("tokens/s, tensor 2 / one rank with 2 threads", 3, 5),
        (
            "tokens/s, tensor 2 sequence parallel / one rank with 2 threads",
            3,
            6,
        ),
        ("tokens/s, data 2 / plain Burn with 2 threads", 2, 4),
        ("tokens/s, tensor 2 / plain Burn with 2 threads", 2, 5),
        ("tokens/s, one rank with 2 threads / with 1 thread", 1, 3),
    ] {
        let [min, median, max] = ratio(a, b);
        println!("{what:<72} {median:.2}  ({min:.2} to {max:.2})");
    }
    Ok(())
}

/// Returns the minimum, the median and the maximum.
fn min_median_max(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [
        values[0],
        values[values.len() / 2],
        values[values.len() - 1],
    ]
}

impl Variant {
    /// Returns the seconds of `steps` steps after the warm-up.
    fn run(&self, steps: usize, sampler: &TextSamples) -> Result<f64, AnyError> {
        let (tensor, data, sequence_parallel) = self.layout.unwrap_or((1, 1, false));
        let world = World::threads(tensor * data)?.compute_threads(self.threads);
        let seconds = world.run(|rank| -> Result<f64, AnyError> {
            let layout = ParallelConfig::new()
                .with_tensor(tensor)
                .with_data(data)
                .with_sequence_parallel(sequence_parallel);
            let groups = ParallelContext::new(&layout, &rank)?;
            let mut step: Step = match self.layout {
                None => plain_step(sampler),
                Some(_) => parallel_step(&groups, sampler)?,
            };
            for number in 0..WARM_UP.min(steps) {
                step(number)?;
            }
            groups.world().barrier()?;
            let started = Instant::now();
            for number in 0..steps {
                step(WARM_UP + number)?;
            }
            groups.world().barrier()?;
            Ok(started.elapsed().as_secs_f64())
        })?;
        Ok(seconds[0])
    }
}

fn plain_step(sampler: &TextSamples) -> Step<'_> {
    let device = Device::flex().autodiff();
    let config = config::GptConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        hidden: HIDDEN,
        heads: HEADS,
        layers: LAYERS,
    };
    let mut model = Some(plain::Gpt::new(&config, &device));
    let mut optimizer = BurnAdamWConfig::new().with_weight_decay(0.1).init();
    Box::new(move |step| {
        let Some(before) = model.take() else {
            return Err("an earlier step has failed".into());
        };
        let (tokens, targets) = batch(sampler, step, 0..BATCH, &device)?;
        let gradients = before.loss(tokens, targets).backward();
        let gradients = GradientsParams::from_grads(gradients, &before);
        model = Some(optimizer.step(LEARNING_RATE, before, gradients));
        Ok(())
    })
}

fn parallel_step<'a>(
    groups: &ParallelContext,
    sampler: &'a TextSamples,
) -> Result<Step<'a>, AnyError> {
    let config = TransformerConfig {
        vocabulary: VOCABULARY,
        context: CONTEXT,
        hidden: HIDDEN,
        heads: HEADS,
        layers: LAYERS,
        activation: Activation::Gelu,
        tied: false,
        ..TransformerConfig::gpt2()
    };
    let model = config.init(groups, &Device::flex())?;
    let mut ddp = DistributedDataParallel::new(model, groups)?;
    let mut optimizer = ParallelAdamW::new(&AdamWConfig::default(), &ddp)?;
    let own = BATCH / groups.data().size();
    let first = groups.data().rank() * own;
    let device = Device::flex().autodiff();
    Ok(Box::new(move |step| {
        let (tokens, targets) = batch(sampler, step, first..first + own, &device)?;
        let loss = ddp.forward(&device, |model| model.losses(tokens, targets).sum());
        ddp.backward(loss);
        let gradients = ddp.reduce((own * CONTEXT) as u64)?;
        optimizer.step(LEARNING_RATE, &mut ddp, gradients);
        Ok(())
    }))
}

fn batch(
    sampler: &TextSamples,
    step: usize,
    samples: Range<usize>,
    device: &Device,
) -> Result<(Tensor<2, Int>, Tensor<2, Int>), AnyError> {
    let number = |sample: usize| (step * BATCH + sample) as u64;
    let batch = sampler.batch(number(samples.start)..number(samples.end))?;
    let shape = [batch.rows, batch.seq];
    let matrix = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, shape), device);
    Ok((matrix(batch.tokens().to_vec()), matrix(batch.targets)))
}
