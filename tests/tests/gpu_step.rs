//! Tests the launches, copies and waits of a training step with the counts of the emulated GPU:
//! `cargo xtask emulate step`. The budgets are in `gpu_step.toml`.
#![cfg(feature = "cuda")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{env, fs};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, DistributedDataParallel, Precision};
use burn_megatron::kernels::moe::grouped::{accumulate_grouped_weight_gradient_at, grouped_matmul};
use burn_megatron::kernels::philox::Stream;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::{MoeForward, MoeMlpConfig, RouterConfig};
use burn_megatron::nn::{Activation, ModelBuilder};
use burn_megatron_data::{DataError, Sample, Samples};
use burn_megatron_kernel_check::bound::H100;
use burn_megatron_kernel_check::bound::launch::{Limit, limits};
use burn_megatron_models::TransformerConfig;
use burn_megatron_test_support::skipped;
use burn_megatron_tests::gpu;
use burn_megatron_tests::step::budget::kernels_of;
use burn_megatron_tests::step::{Budgets, Launch, ROW, StepCase, StepCounts, StepReport, StepRuns};
use burn_megatron_train::{NoopObserver, TrainConfig, Trainer};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// The variable that names the file to which the emulated GPU writes its counts.
const COUNTS: &str = "BURN_MEGATRON_EMULATOR_COUNTS";

const BUDGETS: &str = include_str!("gpu_step.toml");

/// Random tokens. A few of the tokens are frequent.
struct Tokens {
    vocabulary: u64,
}

impl Samples for Tokens {
    fn seq(&self) -> usize {
        ROW
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let mut tokens = vec![];
        Stream::new(number, 0).words(0, ROW + 1, |_, word| {
            let below = match word % 4 {
                0 => 16,
                _ => self.vocabulary,
            };
            tokens.push((u64::from(word / 4) % below) as i32);
        });
        Ok(Sample {
            targets: tokens[1..].to_vec(),
            tokens: tokens[..ROW].to_vec(),
            documents: vec![],
            padding: 0,
        })
    }
}

/// Returns the lines that the device writes during `work`.
fn lines<T>(
    counts: &Path,
    device: &Device,
    work: impl FnOnce() -> T,
) -> Result<(T, String), AnyError> {
    let length = || fs::read_to_string(counts).map(|text| text.len());
    let before = length()?;
    let result = work();
    device.sync()?;
    Ok((result, fs::read_to_string(counts)?.split_off(before)))
}

/// Counts the second step of a run. The first step compiles and tunes.
fn counted(
    config: &TransformerConfig,
    fp8: &Fp8Config,
    rows: usize,
    counts: &Path,
) -> Result<StepCounts, AnyError> {
    let device = gpu();
    let precision = Precision::Bf16;
    let settings = TrainConfig {
        steps: 2,
        micro_batch_size: rows,
        global_batch_size: rows,
        warmup_steps: 1,
        data_parallel: DataParallelConfig {
            precision,
            ..DataParallelConfig::default()
        },
        ..TrainConfig::default()
    };
    let groups = ParallelContext::single();
    let scope = ModelBuilder::with(&groups, &device, settings.seed, DType::F32)
        .with_compute_dtype(precision.of(DType::F32))
        .with_fp8(fp8)?;
    let model = config.init_with(scope)?;
    let mut trainer = Trainer::new(model, &groups, &device, &settings)?;
    let tokens = Tokens {
        vocabulary: config.vocabulary as u64,
    };
    let mut step = || trainer.step(&tokens, &mut NoopObserver);
    step()?;
    device.sync()?;
    let ((), waited) = lines(counts, &device, || ())?;
    let (metrics, counted) = lines(counts, &device, step)?;
    let metrics = metrics?;
    if metrics.skipped {
        return Err(format!("the step was skipped: {metrics:?}").into());
    }
    // The lines of the final wait do not belong to the step.
    let counted = counted.strip_suffix(&waited);
    Ok(StepCounts::parse(
        counted.ok_or("the step ends without a wait")?,
    )?)
}

fn runs(case: &StepCase, counts: &Path) -> Result<StepRuns, AnyError> {
    let run = |layers, rows| {
        let config = TransformerConfig {
            layers,
            ..case.config.clone()
        };
        counted(&config, &case.fp8, rows, counts)
    };
    Ok(StepRuns([
        [run(1, 1)?, run(1, 2)?],
        [run(2, 1)?, run(2, 2)?],
    ]))
}

/// Returns the names of the project's kernels.
fn ours() -> Result<BTreeSet<String>, String> {
    kernels_of(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../burn-megatron-kernels/src"))
}

/// Tests are counted one after the other.
static ONE: Mutex<()> = Mutex::new(());

/// Returns the file of counts. Without it, the test is skipped.
#[track_caller]
fn counts_file() -> Option<PathBuf> {
    let counts = env::var_os(COUNTS).map(PathBuf::from);
    if counts.is_none() {
        skipped(format!("{COUNTS} is not set: cargo xtask emulate step"));
    }
    counts
}

#[track_caller]
fn check(name: &str) {
    let Some(counts) = counts_file() else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let case = StepCase::all().into_iter().find(|case| case.name == name);
    let case = case.expect("a case of this name");
    let runs = runs(&case, &counts).unwrap_or_else(|error| panic!("{name}: {error}"));
    let report = StepReport::new(&case, &runs).expect("steps that are alike");
    println!("\n{report}");
    let budgets = Budgets::parse(BUDGETS).expect("budgets");
    let failures = budgets.failures(&report, &ours().expect("kernels"));
    let failures = failures.expect("a budget");
    let lines = failures.iter().map(|failure| format!("{failure}\n"));
    assert!(
        failures.is_empty(),
        "{name}:\n{}",
        lines.collect::<String>()
    );
}

#[test]
fn gpt_768() {
    check("gpt-768");
}

#[test]
#[ignore = "slow: ten minutes"]
fn gpt_768_fp8() {
    check("gpt-768-fp8");
}

#[test]
#[ignore = "slow: ten minutes and more"]
fn llama_768() {
    check("llama-768");
}

#[test]
#[ignore = "slow: ten minutes and more"]
fn gpt_1600() {
    check("gpt-1600");
}

#[test]
#[ignore = "slow: ten minutes and more"]
fn llama_1600() {
    check("llama-1600");
}

/// Counts the products of `experts` experts of DeepSeek-V2-Lite: `[rows, hidden]` times the weights of gate and
/// value, and both gradients, with 128 rows per expert.
fn products_of_experts(experts: usize, counts: &Path) -> Result<StepCounts, AnyError> {
    const ROWS: usize = 128;
    let [hidden, outputs] = [2048, 2 * 1408];
    let (device, dtype) = (gpu(), DType::BF16);
    let ones = |rows, columns| Tensor::<2>::ones([rows, columns], (&device, dtype));
    let (x, dy) = (ones(experts * ROWS, hidden), ones(experts * ROWS, outputs));
    let weights = ones(experts * hidden, outputs).reshape([experts, hidden, outputs]);
    let flat = Tensor::zeros([experts * hidden * outputs], (&device, DType::F32));
    let sizes = vec![ROWS; experts];
    device.sync()?;
    let work = || {
        let y = grouped_matmul(x.clone(), weights.clone(), &sizes);
        let dx = grouped_matmul(dy.clone(), weights.swap_dims(1, 2), &sizes);
        let dw = accumulate_grouped_weight_gradient_at(x, dy, &sizes, flat, 0, true);
        (y, dx, dw)
    };
    let (_, counted) = lines(counts, &device, work)?;
    Ok(StepCounts::parse(&counted)?)
}

/// Tests 64 experts: three launches, limited by the tensor cores or by memory. Every limit except memory may take up to
/// 1.5 times the minimum time of the tensor cores, since `mma.sync` does not reach their peak.
#[test]
fn products_of_experts_are_bound_by_matrix_units_and_memory() {
    let Some(counts) = counts_file() else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let run = |experts| products_of_experts(experts, &counts).expect("counts");
    let (one, two) = (run(2), run(4));
    let all = StepCounts::at_rows(&one, &two, 32.0);
    let names = [
        "grouped_product",
        "grouped_product",
        "grouped_weight_gradient",
    ];
    assert_eq!(all.launches.len(), names.len());
    // One list of rows for each product.
    assert_eq!((all.to_device, all.products.len()), (names.len(), 0));
    for (launch, name) in all.launches.iter().zip(names) {
        assert!(launch.kernel.starts_with(name), "{}", launch.kernel);
        let limits = limits(&launch.counts, &H100);
        let of = |wanted| {
            let mut limits = limits.iter();
            let found = limits.find(|(_, limit)| *limit == wanted);
            found.expect("a limit").0
        };
        let tensor = of(Limit::Tensor);
        for (seconds, limit) in limits {
            println!(
                "{name}: {} {:.3} ms, {:.2} of tensor",
                limit.name(),
                1e3 * seconds,
                seconds / tensor
            );
        }
        for (seconds, limit) in limits
            .into_iter()
            .filter(|(_, limit)| *limit != Limit::Memory)
        {
            assert!(seconds <= 1.5 * tensor, "{name}: {}", limit.name());
        }
    }
}

/// Counts a layer of `experts` experts of DeepSeek-V2-Lite, forward and backward, with 128 rows per expert and 8
/// experts per token. Gradients of weights are added to the flat bucket.
fn layer_of_experts(experts: usize, counts: &Path) -> Result<StepCounts, AnyError> {
    const ROWS: usize = 128;
    const CHOSEN: usize = 8;
    let (device, groups) = (gpu(), ParallelContext::single());
    let tokens = experts * ROWS / CHOSEN;
    let builder = ModelBuilder::with(&groups, &device, 1, DType::BF16);
    let router = RouterConfig::new(2048, experts, CHOSEN);
    let layer = MoeMlpConfig::new(router, 1408, Activation::SwiGlu).init(&builder)?;
    let settings = DataParallelConfig {
        precision: Precision::Bf16,
        ..DataParallelConfig::default()
    };
    let ddp = DistributedDataParallel::with(builder.finish(layer)?, &groups, &settings)?;
    let training = device.clone().autodiff();
    let choices = (0..tokens * CHOSEN).map(|pair| (pair % experts) as i32);
    let choices = TensorData::new(choices.collect::<Vec<_>>(), [tokens, CHOSEN]);
    let choices = Tensor::<2, Int>::from_data(choices, &device);
    let x = Tensor::<3>::ones([1, tokens, 2048], (&training, DType::BF16));
    let step = || {
        let x = x.clone().require_grad();
        let with = MoeForward {
            choices: Some(choices.clone()),
            tokens: None,
            step: None,
            nodes: None,
        };
        let loss = ddp.forward(&training, |layer| layer.forward_with(x, with).sum());
        ddp.backward(loss)
    };
    step();
    device.sync()?;
    let (_, counted) = lines(counts, &device, step)?;
    Ok(StepCounts::parse(&counted)?)
}

/// Tests 64 experts. The host reads only the counts. The number of launches does not grow with the experts. The layer
/// moves little more than the weights in both directions and their gradients.
#[test]
#[ignore = "slow: seven minutes"]
fn a_layer_of_experts_moves_its_weights_and_little_else() {
    let Some(counts) = counts_file() else { return };
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let run = |experts| layer_of_experts(experts, &counts).expect("counts");
    let (one, two) = (run(8), run(16));
    assert_eq!(one.launches.len(), two.launches.len());
    let all = StepCounts::at_rows(&one, &two, 8.0);
    let seconds = |launch: &Launch| {
        let limits = limits(&launch.counts, &H100);
        let mut limits = limits.iter();
        let memory = limits.find(|(_, limit)| *limit == Limit::Memory);
        memory.expect("a limit").0
    };
    for launch in &all.launches {
        println!("{:.4} ms  {}", 1e3 * seconds(launch), launch.kernel);
    }
    let moved: f64 = all.launches.iter().map(seconds).sum();
    let weights = 64.0 * 3.0 * 2048.0 * 1408.0;
    // The weights are read in the forward and backward pass with 16 bits each. Gradients are accumulated in f32.
    let least = weights * (2.0 + 2.0 + 8.0) / H100.copy;
    println!(
        "{} launches, {} copies to the host; {:.3} ms of memory, {:.2} of the least",
        all.launches.len(),
        all.to_host,
        1e3 * moved,
        moved / least
    );
    assert_eq!((all.to_host, all.products.len()), (1, 0));
    // Six of the launches belong to the loss of this test and its gradient.
    assert!(all.launches.len() <= 45, "{} launches", all.launches.len());
    assert!(moved <= 1.25 * least, "{moved} s, {least} at least");
}
