//! Tests that optimizer state on the host gives the same bits.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, Tensor};
use burn_megatron::checkpoint::{Checkpoint, CheckpointFolder, LoadTolerance};
use burn_megatron::kernel_selection::{KernelChoice, KernelChoices};

use burn_megatron::data_parallel::{MemoryPlan, Moments, OffloadConfig, OffloadPlan, Precision};
use burn_megatron::host_link::HostTraffic;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{LossScale, LossScaleConfig};
use burn_megatron_tests::Text;
use burn_megatron_tests::overflows::{assert_overflows, overflowing, train};
use burn_megatron_train::{NoopObserver, Saver};

use crate::resume::run::{Case, Folder, assert_same};

const STEPS: usize = 4;

/// The results of a rank, and its resource usage.
struct RankReport {
    /// The metrics of each step, and the bits of the weights.
    steps: Vec<String>,
    weights: Vec<Vec<u64>>,
    /// The number of steps that were not skipped.
    taken: usize,
    offload: OffloadPlan,
    buckets: usize,
    planned: MemoryPlan,
    now: MemoryPlan,
    traffic: HostTraffic,
}

fn offloading(case: &Case, optimizer: f64) -> Case {
    let mut case = case.clone();
    case.train.data_parallel.offload = OffloadConfig { optimizer };
    case
}

/// Returns a small Llama in a layout, with gradient clipping.
fn case(layout: &str, precision: Precision, moments: Moments) -> Case {
    let mut case = Case::llama(layout);
    case.train.steps = STEPS;
    case.train.clip = 0.2;
    case.train.data_parallel.precision = precision;
    case.train.data_parallel.moments = moments;
    if precision == Precision::F16 {
        // The first step overflows and is skipped.
        case.train.loss_scale = Some(LossScale::Dynamic(LossScaleConfig {
            initial: 2f64.powi(40),
            backoff: 2f64.powi(-34),
            hysteresis: 1,
            ..LossScaleConfig::default()
        }));
    }
    case
}

/// Runs steps from a checkpoint or from the start until step `stop`, and saves into `into`.
fn run(case: &Case, from: Option<&Path>, stop: usize, into: &Path) -> Vec<RankReport> {
    let text = Text::new();
    let text = text.open();
    case.on_ranks(|groups| {
        let mut trainer = case.trainer(groups)?;
        if let Some(from) = from {
            trainer.load(&Checkpoint::open(from)?, LoadTolerance::default())?;
        }
        trainer.save_with(Saver::open(case.saving(into), groups)?);
        let samples = text.samples(case.model.context, case.train.seed)?;
        let (mut steps, mut taken) = (vec![], 0);
        while trainer.steps() < stop {
            let metrics = trainer.step(&samples, &mut NoopObserver)?;
            assert!(metrics.skipped || metrics.gradient_norm > case.train.clip);
            taken += usize::from(!metrics.skipped);
            steps.push(format!("{metrics:?}"));
        }
        trainer.save()?;
        let ddp = trainer.model();
        ddp.check_replicas()?;
        let bits = |tensor: Tensor<1>| tensor.into_data().iter::<f64>().map(f64::to_bits).collect();
        Ok(RankReport {
            steps,
            weights: ddp.parameters().into_iter().map(bits).collect(),
            taken,
            offload: *ddp.offload(),
            buckets: ddp.layout().bucket_count(),
            planned: ddp.memory_plan()?,
            now: ddp.usage().now(),
            traffic: ddp.host_traffic(),
        })
    })
    .unwrap()
}

fn assert_equal(name: &str, found: &[RankReport], expected: &[RankReport]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let of = |report: &RankReport| report.steps[report.steps.len() - 1].clone();
        assert_eq!(of(found), of(expected), "{name}");
        assert!(found.weights == expected.weights, "{name}: weights differ");
    }
}

#[test]
fn every_fraction_is_bit_equal_in_every_zero_stage() {
    use Precision::{Bf16, F16, F32};
    let folder = Folder::new();
    for (layout, precision, moments) in [
        ("dp2-mb6", F32, Moments::F32),
        ("dp2-mb6", F16, Moments::F32),
        ("dp2-mb6-z1", F32, Moments::F32),
        ("dp2-mb6-z1", Bf16, Moments::Bf16),
        ("dp2-mb6-z2", F32, Moments::Bf16),
        ("dp2-mb6-z2", F16, Moments::F32),
        ("dp2-mb6-z3", F32, Moments::F32),
        ("dp2-mb6-z3", F16, Moments::Bf16),
        ("dp4-mb3-z2-hsdp2", Bf16, Moments::F32),
        ("tp2-sp-pp2-dp2-mb3-z1/1f1b", F32, Moments::F32),
    ] {
        let case = case(layout, precision, moments);
        let name = |fraction: f64| format!("{layout} in {precision}, {fraction} on the host");
        let into = |fraction: f64| folder.join(&name(fraction).replace('/', "-"));
        let plain = run(&case, None, STEPS, &into(0.0));
        for fraction in [0.3, 1.0] {
            let name = name(fraction);
            let offloading = offloading(&case, fraction);
            let found = run(&offloading, None, STEPS, &into(fraction));
            for (found, plain) in found.iter().zip(&plain) {
                assert_eq!(found.steps, plain.steps, "{name}");
                check_use(&name, fraction, found, plain);
            }
            assert_equal(&name, &found, &plain);
            assert_same(&name, &saved(&into(0.0)), &saved(&into(fraction)));
        }
        let skips = precision == F16;
        assert_eq!(plain[0].taken, STEPS - usize::from(skips), "{layout}");
    }
}

/// Checks that the bytes on the device and on the host equal the plan, and that the transfers equal the formula.
fn check_use(name: &str, fraction: f64, found: &RankReport, plain: &RankReport) {
    let RankReport {
        offload,
        now,
        planned,
        traffic,
        ..
    } = found;
    let state = |plan: &MemoryPlan| (plan.optimizer, plan.host_optimizer);
    assert_eq!(state(now), state(planned), "{name}");
    let on_device = planned.optimizer as f64;
    let all = plain.planned.optimizer as f64;
    assert!(on_device <= (1.0 - fraction) * all, "{name}");
    if fraction == 1.0 {
        assert_eq!(offload.buckets, found.buckets, "{name}");
        assert_eq!(planned.optimizer, 0, "{name}");
    } else {
        // A pipeline stage has two buckets. The first bucket may be the smaller one.
        let most = found.buckets - usize::from(name.starts_with("dp"));
        assert!((1..=most).contains(&offload.buckets), "{name}");
    }
    let steps = found.taken as u64;
    let expected = HostTraffic {
        up: steps * offload.up,
        down: steps * offload.down,
    };
    assert_eq!(*traffic, expected, "{name}");
    assert_eq!(plain.traffic, HostTraffic::default());
}

/// Returns the only checkpoint of a folder.
fn saved(folder: &Path) -> PathBuf {
    let folder = CheckpointFolder::open(folder).unwrap();
    folder.latest().unwrap().unwrap().path().to_path_buf()
}

#[test]
fn a_run_resumes_bit_equal_with_another_fraction() {
    let folder = Folder::new();
    for (number, (layout, precision)) in [
        ("dp2-mb6-z1", Precision::F16),
        ("dp2-mb6-z3", Precision::F32),
    ]
    .into_iter()
    .enumerate()
    {
        let case = case(layout, precision, Moments::F32);
        let path = |name: &str| folder.join(&format!("{number}-{name}"));
        let whole = run(&case, None, STEPS, &path("whole"));
        for (from, to) in [(0.0, 1.0), (1.0, 0.3), (0.3, 0.0)] {
            let name = format!("{layout}: {from} to {to}");
            let [first, second] = ["first", "second"].map(|part| path(&format!("{part}-{to}")));
            run(&offloading(&case, from), None, STEPS / 2, &first);
            let resumed = offloading(&case, to);
            let found = run(&resumed, Some(&saved(&first)), STEPS, &second);
            assert_equal(&name, &found, &whole);
            assert_same(&name, &saved(&path("whole")), &saved(&second));
        }
    }
}

/// If the outcome of a step is on the device, the host also takes or skips the step. Metrics, weights and checkpoints
/// are the same.
#[test]
fn skipped_steps_are_skipped_on_the_host() {
    let text = Text::new();
    let run = |fraction: f64, defers: bool| {
        let mut config = overflowing(Precision::F16, 2f64.powi(26));
        config.data_parallel.bucket_size = Some(2000);
        config.data_parallel.offload.optimizer = fraction;
        let settings = (&config, &Fp8Config::default(), None);
        train(
            &Device::flex(),
            "dp2-mb2-z1",
            settings,
            &text.open(),
            defers,
        )
    };
    let plain = run(0.0, false);
    assert_overflows(&plain, "nothing on the host");
    assert_eq!(run(0.5, true), plain);
}

#[test]
fn an_unfused_optimizer_cannot_be_offloaded() {
    let mut case = offloading(&Case::llama("dp2-mb6"), 0.5);
    case.kernels = KernelChoices::all(KernelChoice::Unfused);
    let error = case.on_ranks(|groups| case.trainer(groups).map(drop));
    let error = error.unwrap_err();
    assert!(
        error.contains("offload.optimizer = 0.5 requires the fused AdamW"),
        "{error}"
    );
}
