//! Steps that are computed twice: equal ones are silent, and a flipped bit is found, with its rank and its place.

use std::sync::{Arc, Mutex};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::comm::testing::fault_injection::{Fault, FaultPlan, FlipTarget, inject};
use burn_megatron::comm::{ParallelContext, World, WorldError};
use burn_megatron::data_parallel::Precision;
use burn_megatron::nn::ModelBuilder;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::optim::SpikeConfig;
use burn_megatron::train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron::train::{
    ModelConfig, Observer, ObserverError, ReplayError, TrainConfig, TrainError, Trainer, Verdict,
};
use burn_megatron::verify::Layout;
use burn_megatron_models::{MoeConfig, TransformerConfig};
use burn_megatron_tests::{Text, small_llama};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

const STEPS: usize = 4;

/// A run of a small model.
struct Run {
    layout: Layout,
    config: TrainConfig,
    fp8: Fp8Config,
    moe: Option<MoeConfig>,
    faults: Vec<Fault>,
}

/// What a rank has at the end.
#[derive(Debug, PartialEq)]
struct RankEnd {
    weights: Vec<Vec<u64>>,
    state: String,
    steps: Vec<String>,
    /// How many activations, gradients and calls there were.
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
    /// With every step checked.
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
            moe: None,
            faults: vec![],
        }
    }

    fn with_experts(mut self) -> Self {
        self.moe = Some(MoeConfig {
            experts: 4,
            expert_width: Some(16),
            score: ScoreFunction::Sigmoid,
            bias_update_rate: Some(0.01),
            ..MoeConfig::default()
        });
        self
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
            let device = Device::flex();
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
                moe: self.moe.clone(),
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

    /// The check that ends the run.
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

fn assert_same_bits(mut run: Run, text: &Text) {
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
}

#[test]
fn a_run_has_the_same_bits_with_and_without_the_check() {
    let text = Text::new();
    for layout in [
        "tp1",
        "tp2-sp-dp2-mb2-z2",
        "pp2-dp2-mb1-z1/1f1b",
        "dp2-mb2-z3",
    ] {
        assert_same_bits(Run::new(layout), &text);
    }
    assert_same_bits(Run::new("tp1-ep2-dp2-mb2").with_experts(), &text);
    let mut delayed = Run::new("dp2-mb2-z1");
    delayed.fp8.recipe = Some("delayed".parse().unwrap());
    delayed.config.data_parallel.precision = Precision::Bf16;
    delayed.config.evaluate_every = Some(2);
    assert_same_bits(delayed, &text);
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
                "returned something else",
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

#[test]
fn runs_that_all_differ_are_not_deterministic() {
    let text = Text::new();
    let per_step = Run::new("dp2-mb2").run(&text).unwrap()[0].counted[0] / (2 * STEPS as u64 - 1);
    let faults = [0, 1, 2].map(|run| {
        let call = 9 + run * per_step;
        format!("bit-flip:activation:7:{run}@rank=0,step=2,call={call}")
    });
    let faults = faults.each_ref().map(String::as_str);
    let found = Run::new("dp2-mb2").with_faults(&faults).error(&text);
    assert_eq!(found.verdict, Verdict::NotDeterministic, "{found}");
    assert!(
        found.message.contains("on rank 0 the forward of "),
        "{found}"
    );
    // Between the checks a fault has its effect.
    let mut run = Run::new("dp2-mb2").with_faults(&faults[..1]);
    run.config.check_replay_every = Some(3);
    run.run(&text).unwrap();
}

#[test]
fn a_bad_loss_is_due_to_a_device_only_if_another_one_computes_a_good_one() {
    let text = Text::new();
    let mut run = Run::new("dp2-mb2");
    run.config.check_replay_every = Some(100);
    // No gradient is below it.
    run.config.data_parallel.gradient_limit = Some(1e-9);
    run.config.skip_limit = 2.try_into().unwrap();
    let found = run.error(&text);
    assert_eq!(found.verdict, Verdict::DataOrSoftware, "{found}");

    // The loss of the first micro-batch of rank 1 gets a large exponent.
    let with_losses = |faults: &[String]| {
        let faults: Vec<_> = faults.iter().map(String::as_str).collect();
        let mut run = Run::new("dp2-mb2").with_faults(&faults);
        run.config.check_replay_every = Some(100);
        run.config.steps = 8;
        run.config.skip_spikes = Some(SpikeConfig {
            sigmas: 1e6,
            window: 4,
        });
        run
    };
    let per_step = with_losses(&[]).run(&text).unwrap()[1].counted[0] / 8;
    let flip = |run: u64| {
        let call = per_step / 2 - 1 + run * per_step;
        format!("bit-flip:activation:0:29@rank=1,step=6,call={call}")
    };
    let found = with_losses(&[flip(0)]).error(&text);
    assert_eq!(
        (found.step, found.verdict),
        (6, Verdict::Transient),
        "{found}"
    );
    assert!(found.message.contains("on rank 1"), "{found}");
    let found = with_losses(&[flip(0), flip(1)]).error(&text);
    assert_eq!((found.step, found.verdict), (6, Verdict::Device), "{found}");
    assert!(found.message.contains("those of rank 1"), "{found}");
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
    assert!(matches!(refused, TrainError::DeferredReplay), "{refused}");
}

/// Numbers that look random.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end.max(1)
    }
}

/// 100 flips at random places, each of which must be attributed, and 100 runs without one, which must be silent. It takes
/// minutes: `cargo test -p burn-megatron-tests --test main replay::a_hundred -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes"]
fn a_hundred_flips_are_attributed_and_a_hundred_clean_runs_are_silent() {
    let text = Text::new();
    let layouts = [
        "dp2-mb2",
        "tp2-sp-mb2",
        "tp2-dp2-mb2-z1",
        "dp2-mb2-z2",
        "dp2-mb2-z3",
        "dp4-mb2",
    ];
    let experts = ["tp1-ep2-dp2-mb2"];
    let pipelines = ["pp2-mb2/1f1b"];
    let mut draws = Draws(1);
    let counts = Mutex::new(std::collections::BTreeMap::new());
    let run_of = |layout: &str| match experts.contains(&layout) {
        true => Run::new(layout).with_experts(),
        false => Run::new(layout),
    };
    let all: Vec<_> = layouts
        .iter()
        .chain(&experts)
        .chain(&pipelines)
        .copied()
        .collect();
    for layout in &all {
        let checked = run_of(layout).run(&text).unwrap();
        let mut plain = run_of(layout);
        plain.config.check_replay_every = None;
        let plain = plain.run(&text).unwrap();
        let of_rank = |(checked, plain): (&RankEnd, &RankEnd)| {
            let steps = STEPS as u64;
            let [activations, gradients, calls] = plain.counted;
            // One call more in each step, and one more in each checked one.
            let more = checked.counted[2] - calls - 1;
            [
                activations / steps,
                gradients / steps,
                more / (steps - 1) - 2,
            ]
        };
        let of_ranks: Vec<_> = checked.iter().zip(&plain).map(of_rank).collect();
        println!("{layout}: per rank and step, activations, gradients, calls: {of_ranks:?}");
        counts.lock().unwrap().insert(*layout, of_ranks);
    }
    let counts = counts.into_inner().unwrap();
    let mut found = std::collections::BTreeMap::<String, usize>::new();
    for number in 0..100 {
        let target = FlipTarget::ALL[number % 5];
        // Messages that are no tensors, such as counts of rows, are checked otherwise.
        let layouts = match target {
            FlipTarget::Collective => &layouts[..],
            _ => &all[..],
        };
        let layout = layouts[draws.below(layouts.len() as u64) as usize];
        let rank = draws.below(counts[layout].len() as u64) as usize;
        let [activations, gradients, calls] = counts[layout][rank];
        // In the first run of the step or the second.
        let call = match target {
            FlipTarget::Activation => draws.below(2 * activations),
            FlipTarget::Gradient => draws.below(2 * gradients),
            FlipTarget::Collective => draws.below(calls),
            FlipTarget::Weight | FlipTarget::Optimizer => draws.below(6),
        };
        let (step, element, bit) = (2 + draws.below(3), draws.below(1 << 20), draws.below(32));
        let fault = format!(
            "bit-flip:{}:{element}:{bit}@rank={rank},step={step},call={call}",
            target.name()
        );
        let error = run_of(layout).with_faults(&[&fault]).error(&text);
        println!("{layout} {fault}: {error}");
        let on_rank = error.message.contains(&format!("on rank {rank} "));
        let kind = match target {
            FlipTarget::Activation => error.message.contains(" the forward of "),
            FlipTarget::Gradient => error.message.contains(" the backward of "),
            FlipTarget::Weight => error.message.contains(" the weights of "),
            FlipTarget::Optimizer => error.message.contains(" adamw."),
            FlipTarget::Collective => error.message.contains(" over "),
        };
        let verdict = if target.is_state() {
            Verdict::StateChanged
        } else {
            Verdict::Transient
        };
        assert!(on_rank && kind, "{layout} {fault}: {error}");
        assert_eq!(
            (error.step as u64, error.verdict),
            (step, verdict),
            "{fault}"
        );
        *found.entry(target.name().into()).or_default() += 1;
    }
    println!("attributed: {found:?}");
    for number in 0..100u64 {
        let layout = all[number as usize % all.len()];
        let mut run = run_of(layout);
        run.config.seed = number;
        run.run(&text).unwrap();
    }
    println!("100 clean runs were silent");
}
