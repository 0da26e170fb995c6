//! Tests of steps that are computed twice. Equal steps are silent. A flipped bit is found, with its rank and its
//! position.

mod hundred;

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::{ParallelContext, World, WorldError};
use burn_megatron::data_parallel::Precision;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::optim::SpikeConfig;
use burn_megatron_comm_testing::fault_injection::{Fault, FaultPlan, FlipTarget, inject};
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_tests::{Text, small_llama};
use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron_train::{
    Observer, ObserverError, ReplayError, TrainConfig, TrainError, Trainer, Verdict,
};
use burn_megatron_verify::Layout;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const STEPS: usize = 4;

/// A run of a small model.
struct Run {
    layout: Layout,
    config: TrainConfig,
    fp8: Fp8Config,
    faults: Vec<Fault>,
    device: Device,
}

/// The final state of a rank.
#[derive(Debug, PartialEq)]
struct RankEnd {
    weights: Vec<Vec<u64>>,
    state: String,
    steps: Vec<String>,
    /// The numbers of activations, gradients and calls.
    counted: [u64; 3],
}

/// The metrics of each step, as text, so that NaN equals itself.
#[derive(Default)]
struct Steps(Vec<String>);

impl Observer for Steps {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

impl Run {
    /// Creates a run in which every step is checked.
    fn new(layout: &str) -> Self {
        let layout: Layout = layout.parse().unwrap();
        Self {
            config: TrainConfig {
                steps: STEPS,
                global_batch_size: 8,
                micro_batch_size: layout.micro_batch.unwrap_or(2),
                warmup_steps: 2,
                held_out_samples: 4,
                check_replay_every: Some(1),
                ..TrainConfig::default()
            },
            layout,
            fp8: Fp8Config::default(),
            faults: vec![],
            device: Device::flex(),
        }
    }

    /// Returns experts if the layout splits experts.
    fn moe(&self) -> Option<MoeConfig> {
        self.layout.parallel.splits_experts().then(|| MoeConfig {
            experts: 4,
            expert_width: Some(16),
            score: ScoreFunction::Sigmoid,
            bias_update_rate: Some(0.01),
            ..MoeConfig::default()
        })
    }

    fn with_faults(mut self, faults: &[&str]) -> Self {
        self.faults = faults.iter().map(|fault| fault.parse().unwrap()).collect();
        self
    }

    fn run(&self, text: &Text) -> Result<Vec<RankEnd>, WorldError> {
        let data = text.open();
        let world = World::threads(self.layout.ranks())?
            .call_log_dir(std::env::current_exe().unwrap().join("none"));
        world.run(|rank| -> Result<RankEnd, AnyError> {
            let plan = Arc::new(FaultPlan::new(self.faults.clone()));
            let comm = inject(rank.communicator(), plan.clone());
            let groups = ParallelContext::from_world(&self.layout.parallel, comm)?;
            let device = self.device.clone();
            let precision = self.config.data_parallel.precision;
            let scope = ModelBuilder::with(&groups, &device, 1, precision.master())
                .with_compute_dtype(precision.of(precision.master()))
                .with_fp8(&self.fp8)?;
            let model = TransformerConfig {
                context: 16,
                hidden: 32,
                layers: 2,
                heads: 2,
                dropout: 0.1,
                moe: self.moe(),
                ..TransformerConfig::llama()
            };
            let mut trainer =
                Trainer::new(model.init_with(scope)?, &groups, &device, &self.config)?;
            trainer.inject(plan.clone());
            let mut steps = Steps::default();
            trainer.fit(&data, &mut steps)?;
            let left = plan.not_triggered(groups.rank());
            assert!(left.is_empty(), "{left:?} did not trigger");
            let counted = [
                FlipTarget::Activation,
                FlipTarget::Gradient,
                FlipTarget::Collective,
            ];
            Ok(RankEnd {
                weights: trainer.model().parameters().into_iter().map(bits).collect(),
                state: format!("{:?}", trainer.state()),
                steps: steps.0,
                counted: counted.map(|target| plan.counted(target)),
            })
        })
    }

    /// Returns the check error that ends the run.
    fn error(&self, text: &Text) -> ReplayError {
        match self.run(text) {
            Err(WorldError::RankFailed { source, .. }) => match source.downcast::<TrainError>() {
                Ok(error) => match *error {
                    TrainError::Replay(found) => found,
                    other => panic!("{:?}: {other}", self.faults),
                },
                Err(other) => panic!("{:?}: {other}", self.faults),
            },
            Err(other) => panic!("{:?}: {other}", self.faults),
            Ok(_) => panic!("{:?} was not found", self.faults),
        }
    }
}

fn bits(tensor: Tensor<1>) -> Vec<u64> {
    let values = tensor.into_data().convert_dtype(DType::F64);
    values.iter::<f64>().map(f64::to_bits).collect()
}

/// Returns the number of these events of a rank per step in a run with checks, from the second step on.
fn per_step(run: &mut Run, target: FlipTarget, text: &Text) -> u64 {
    let number = match target {
        FlipTarget::Activation => 0,
        FlipTarget::Gradient => 1,
        _ => 2,
    };
    let steps = run.config.steps;
    let [fewer, all] = [steps - 1, steps].map(|steps| {
        run.config.steps = steps;
        run.run(text).unwrap()[0].counted[number]
    });
    all - fewer
}

/// Asserts that a run has the same bits with and without the check. Returns the run with the check.
fn assert_same_bits(mut run: Run, text: &Text) -> Vec<RankEnd> {
    let checked = run.run(text).unwrap();
    run.config.check_replay_every = None;
    let plain = run.run(text).unwrap();
    for (checked, plain) in checked.iter().zip(&plain) {
        assert!(checked.counted[0] > plain.counted[0]);
        assert_eq!(
            (&checked.weights, &checked.state, &checked.steps),
            (&plain.weights, &plain.state, &plain.steps)
        );
    }
    checked
}

#[test]
fn a_run_has_the_same_bits_with_and_without_the_check() {
    let text = Text::new();
    for layout in [
        "tp1",
        "tp2-sp-dp2-mb2-z2",
        "pp2-dp2-mb1-z1/1f1b",
        "dp2-mb2-z3",
        "tp1-ep2-dp2-mb2",
        "ep2-epoverlap-dp2-mb1",
    ] {
        assert_same_bits(Run::new(layout), &text);
    }
    let mut delayed = Run::new("dp2-mb2-z1");
    delayed.fp8.recipe = Some("delayed".parse().unwrap());
    delayed.config.data_parallel.precision = Precision::Bf16;
    delayed.config.evaluate_every = Some(2);
    // Skipped steps also run on other ranks, and leave nothing behind.
    delayed.config.steps = 6;
    delayed.config.skip_spikes = Some(SpikeConfig {
        sigmas: 0.01,
        window: 2,
    });
    let steps = &assert_same_bits(delayed, &text)[0].steps;
    let mut current = Run::new("tp2-sp-mb2");
    current.fp8.recipe = Some("current".parse().unwrap());
    current.config.evaluate_every = Some(1);
    assert_same_bits(current, &text);
    let skipped = steps[..5].iter().any(|step| step.contains("Spike"));
    assert!(skipped, "{steps:?}");
}

#[test]
fn a_flipped_bit_is_found_with_its_rank_and_its_place() {
    let text = Text::new();
    for (layout, fault, verdict, parts) in [
        (
            "tp2-dp2-mb2",
            "bit-flip:activation:7:3@rank=3,step=2,call=9",
            Verdict::Transient,
            &[
                "the first differs",
                "on rank 3 the forward of ",
                "micro-batch 0",
            ][..],
        ),
        (
            "dp2-mb2-z2",
            "bit-flip:gradient:70:22@rank=1,step=3,call=4",
            Verdict::Transient,
            &["on rank 1 the backward of "],
        ),
        (
            "dp2-mb2",
            "bit-flip:collective:70:22@rank=1,step=3,call=0",
            Verdict::Transient,
            &[
                "on rank 1 call 0 all_reduce over ",
                "returned a different result",
            ],
        ),
        (
            "tp2-sp-mb2",
            "bit-flip:weight:5:12@rank=1,step=2,call=3",
            Verdict::StateChanged,
            &["on rank 1 the weights of "],
        ),
        (
            "dp2-mb2-z1",
            "bit-flip:optimizer:5:12@rank=0,step=4,call=2",
            Verdict::StateChanged,
            &["on rank 0 adamw."],
        ),
    ] {
        let found = Run::new(layout).with_faults(&[fault]).error(&text);
        let step = fault.split("step=").nth(1).unwrap()[..1].parse().unwrap();
        assert_eq!((found.step, found.verdict), (step, verdict), "{found}");
        for part in parts {
            assert!(found.message.contains(part), "{fault}: {found}");
        }
    }
}

#[cfg(any(feature = "cuda", feature = "wgpu"))]
#[test]
fn a_flipped_bit_is_found_on_a_gpu() {
    let text = Text::new();
    let with = |faults: &[&str]| {
        let mut run = Run::new("tp1").with_faults(faults);
        run.device = burn_megatron_tests::gpu();
        run.config.steps = 2;
        run.config.warmup_steps = 1;
        run
    };
    with(&[]).run(&text).unwrap();
    let found = with(&["bit-flip:activation:7:3@rank=0,step=2,call=9"]).error(&text);
    assert_eq!(found.verdict, Verdict::Transient, "{found}");
    assert!(
        found.message.contains("on rank 0 the forward of "),
        "{found}"
    );
    let found = with(&["bit-flip:weight:5:12@rank=0,step=2,call=3"]).error(&text);
    assert_eq!(found.verdict, Verdict::StateChanged, "{found}");
}

#[test]
fn flips_in_the_first_step_and_where_micro_batches_overlap_are_found() {
    let text = Text::new();
    for (layout, step) in [("tp1", 1), ("ep2-epoverlap-dp2-mb1", 3)] {
        let calls = per_step(&mut Run::new(layout), FlipTarget::Activation, &text) / 2;
        // In the middle of the second run of the step. The first step has one more run before it.
        let call = calls + calls / 2;
        let fault = format!("bit-flip:activation:7:3@rank=0,step={step},call={call}");
        let found = Run::new(layout).with_faults(&[&fault]).error(&text);
        assert_eq!(
            (found.step, found.verdict),
            (step, Verdict::Transient),
            "{found}"
        );
        assert!(
            found.message.contains("on rank 0 the forward of "),
            "{found}"
        );
    }
}

#[test]
fn ranks_that_differ_in_what_they_have_in_common_are_found() {
    let text = Text::new();
    // The last call of a step asks whether to stop. The call before it gathers the updated parameters of a bucket.
    let gather = per_step(&mut Run::new("dp4-mb2-z1"), FlipTarget::Collective, &text) - 2;
    for (layout, every, call, message) in [
        ("dp4-mb2-z1", 1, gather, "on rank 1 the copy of "),
        // A sum in a step that is not computed twice.
        ("dp2-mb2", 3, 0, "on ranks 0, 1 the weights of "),
    ] {
        let fault = format!("bit-flip:collective:5:22@rank=1,step=2,call={call}");
        let mut run = Run::new(layout).with_faults(&[&fault]);
        run.config.check_replay_every = Some(every);
        let found = run.error(&text);
        assert_eq!(
            (found.step, found.verdict),
            (3, Verdict::StateChanged),
            "{found}"
        );
        assert!(found.message.starts_with(message), "{found}");
    }
}

#[test]
fn runs_that_all_differ_are_not_deterministic() {
    let text = Text::new();
    let calls = per_step(&mut Run::new("dp2-mb2"), FlipTarget::Activation, &text) / 2;
    let faults = [0, 1, 2].map(|run| {
        let call = 9 + run * calls;
        format!("bit-flip:activation:7:{run}@rank=0,step=2,call={call}")
    });
    let faults = faults.each_ref().map(String::as_str);
    let found = Run::new("dp2-mb2").with_faults(&faults).error(&text);
    assert_eq!(found.verdict, Verdict::NotDeterministic, "{found}");
    assert!(
        found.message.contains("on rank 0 the forward of "),
        "{found}"
    );
    // Between the checks, a fault takes effect.
    let mut run = Run::new("dp2-mb2").with_faults(&faults[..1]);
    run.config.check_replay_every = Some(3);
    run.run(&text).unwrap();
}

#[test]
fn a_bad_loss_that_is_the_same_elsewhere_is_due_to_data_or_software() {
    let text = Text::new();
    for layout in ["dp2-mb2", "tp2-sp-dp2-mb2-z2", "dp2-mb2-z3", "ep2-dp4-mb1"] {
        let mut run = Run::new(layout);
        run.config.check_replay_every = Some(100);
        // No gradient is below this limit.
        run.config.data_parallel.gradient_limit = Some(1e-9);
        run.config.skip_limit = 2.try_into().unwrap();
        let found = run.error(&text);
        assert_eq!(found.verdict, Verdict::DataOrSoftware, "{layout}: {found}");
    }
}

#[test]
fn a_bad_loss_is_due_to_a_device_only_if_another_one_computes_a_good_one() {
    let text = Text::new();
    let with_spikes = |layout: &str, faults: &[String]| {
        let faults: Vec<_> = faults.iter().map(String::as_str).collect();
        let mut run = Run::new(layout).with_faults(&faults);
        run.config.check_replay_every = Some(100);
        run.config.steps = 8;
        run.config.skip_spikes = Some(SpikeConfig {
            sigmas: 1e6,
            window: 4,
        });
        run
    };
    // Two micro-batches on each rank.
    for (layout, target, bit, message) in [
        (
            "dp2-mb2",
            FlipTarget::Activation,
            29,
            "rank 0 has different losses than rank 1",
        ),
        (
            "dp2-mb2",
            FlipTarget::Gradient,
            30,
            "rank 0 has different gradients than rank 1",
        ),
        // Both ranks of one replica of the experts change together.
        (
            "ep2-dp4-mb1",
            FlipTarget::Activation,
            29,
            "rank 3 has different losses than rank 1",
        ),
    ] {
        let calls = per_step(&mut with_spikes(layout, &[]), target, &text);
        // The loss of the first micro-batch of rank 1, or the first gradient of its backward pass, gets a large
        // exponent. The flip happens in the step, and also in its second computation.
        let first = match target {
            FlipTarget::Activation => calls / 2 - 1,
            _ => 0,
        };
        let flip = |run: u64| {
            let (target, call) = (target.name(), first + run * calls);
            format!("bit-flip:{target}:0:{bit}@rank=1,step=6,call={call}")
        };
        let found = with_spikes(layout, &[flip(0)]).error(&text);
        let verdict = (found.step, found.verdict);
        assert_eq!(verdict, (6, Verdict::Transient), "{layout}: {found}");
        let found = with_spikes(layout, &[flip(0), flip(1)]).error(&text);
        let verdict = (found.step, found.verdict);
        assert_eq!(verdict, (6, Verdict::Device), "{layout}: {found}");
        assert!(found.message.contains(message), "{layout}: {found}");
    }
}

#[test]
fn readings_are_not_deferred_with_checks() {
    let groups = ParallelContext::single();
    let device = Device::flex();
    let run = Run::new("tp1");
    let model = small_llama().config;
    let scope = ModelBuilder::new(&groups, &device);
    let mut trainer = Trainer::new(
        model.init_with(scope).unwrap(),
        &groups,
        &device,
        &run.config,
    )
    .unwrap();
    let refused = trainer.defer_readings(true).unwrap_err();
    assert!(matches!(refused, TrainError::Deferred { .. }), "{refused}");
}
