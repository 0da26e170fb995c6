//! The hooks of a step: each changes the run that uses its technique, and all points are called in the order of the docs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, Gradients, Precision};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::optim::{EmaConfig, QkClipConfig, SpikeConfig, TooManySkips};
use burn_megatron_data::{DataError, Dataset, Sample, Samples, Sampling};
use burn_megatron_models::Transformer;
use burn_megatron_train::expert_metrics::ExpertMetrics;
use burn_megatron_train::hooks::{
    AddedStatistics, BatchPlan, HookError, ORDER, RemainingHooks, StepContext, StepDecision,
    StepHook, StepInput, StepReport, StepRun, StepUpdate,
};
use burn_megatron_train::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};
use burn_megatron_train::{
    BatchWarmup, NoopObserver, Observer, ObserverError, SaveConfig, Saver, SequenceWarmup,
    StepGradients, TrainConfig, TrainError, TrainOutcome, Trainer,
};
use burn_megatron_verify::Subject;
use burn_megatron_verify::faults::decoder::FaultySubject;

use super::resume::run::{AnyError, Case, Folder};

const SEQ: usize = 16;
const STEPS: usize = 6;

/// Random tokens in documents of different lengths.
#[derive(Clone, Copy)]
struct Documents;

impl Samples for Documents {
    fn seq(&self) -> usize {
        SEQ
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let token = |at: usize| {
            let mixed = (number * 31 + at as u64 + 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed >> 40) % 256) as i32
        };
        Ok(Sample {
            tokens: (0..SEQ).map(token).collect(),
            targets: (1..=SEQ).map(token).collect(),
            documents: vec![0, 3, 5 + number as usize % 4, 11],
            padding: 0,
        })
    }
}

impl Dataset for Documents {
    fn describe(&self) -> String {
        "random documents".into()
    }

    fn fingerprint(&self) -> u64 {
        1
    }

    fn vocabulary(&self) -> usize {
        256
    }

    fn training(&self, _: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(*self))
    }

    fn held_out(&self, _: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        (0..max as u64)
            .map(|number| self.sample(1000 + number))
            .collect()
    }
}

/// All that an observer gets, as text, so that NaN equals itself.
#[derive(Default)]
struct Seen(Vec<String>);

impl Observer for Seen {
    fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn experts(&mut self, metrics: &ExpertMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }

    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError> {
        self.0.push(format!("{metrics:?}"));
        Ok(())
    }
}

fn short(mut case: Case) -> Case {
    case.train.steps = STEPS;
    case.train.global_batch_size = 4;
    case.train.held_out_samples = 2;
    case.train.evaluate_every = None;
    case
}

fn llama(layout: &str, change: impl FnOnce(&mut Case)) -> Case {
    let mut case = short(Case::llama(layout));
    change(&mut case);
    case
}

/// A run with each technique.
fn techniques() -> Vec<(&'static str, Case)> {
    let same = |_: &mut Case| ();
    let experts = || short(Case::experts("tp1"));
    let batches = BatchWarmup {
        until_step: 2,
        global_batch_size: 2,
    };
    let rows = SequenceWarmup {
        until_step: 2,
        length: 8,
    };
    // So narrow that a larger loss or norm exceeds it.
    let spikes = SpikeConfig {
        sigmas: 1e-3,
        window: 4,
    };
    let ema = EmaConfig {
        decay: 0.9,
        evaluate: true,
    };
    let qk_clip = QkClipConfig {
        threshold: 1e-3,
        alpha: 0.3,
    };
    let fp8 = Fp8Config {
        recipe: Some("delayed".parse().unwrap()),
        ..Fp8Config::default()
    };
    vec![
        (
            "batch_warmup",
            llama("tp1", |case| case.train.batch_warmup = vec![batches]),
        ),
        (
            "sequence_warmup",
            llama("tp1", |case| case.train.sequence_warmup = vec![rows]),
        ),
        ("hybrid_context", llama("hybrid8-dp2-mb1", same)),
        (
            "spikes",
            llama("tp1", |case| case.train.skip_spikes = Some(spikes)),
        ),
        (
            "replay",
            llama("dp2", |case| case.train.check_replay_every = Some(2)),
        ),
        ("fp8_scales", llama("tp1", |case| case.fp8 = fp8)),
        ("expert_load", experts()),
        ("router_bias", experts()),
        (
            "zero_count",
            llama("tp1", |case| case.train.count_zeros = true),
        ),
        (
            "qk_clip",
            llama("tp2", |case| case.train.qk_clip = Some(qk_clip)),
        ),
        (
            "replica_check",
            llama("dp2", |case| case.train.check_replicas_every = Some(1)),
        ),
        ("ema", llama("tp1", |case| case.train.ema = Some(ema))),
    ]
}

/// The weights of the ranks differ where replicas are checked.
fn trainer(
    name: &str,
    case: &Case,
    groups: &ParallelContext,
) -> Result<Trainer<Transformer>, AnyError> {
    let mut case = case.clone();
    if name == "replica_check" {
        case.train.learning_rate *= 1.0 + groups.rank() as f64;
    }
    let trainer = case.trainer(groups)?;
    assert!(trainer.hook_names().contains(&name), "{name}");
    Ok(trainer)
}

/// What a run of each rank shows, or its error.
fn result(name: &str, case: &Case, removes: bool) -> Result<Vec<String>, String> {
    case.on_ranks(|groups| {
        let mut trainer = trainer(name, case, groups)?;
        if removes {
            trainer = trainer.without_hook(name)?;
            assert!(!trainer.hook_names().contains(&name), "{name}");
        }
        let mut seen = Seen::default();
        let outcome = trainer.fit(&Documents, &mut seen)?;
        let bits = |tensor: Tensor<1>| -> Vec<u64> {
            let values = tensor.into_data();
            values.iter::<f64>().map(f64::to_bits).collect()
        };
        let weights: Vec<_> = trainer.model().parameters().into_iter().map(bits).collect();
        let biases = trainer.model().routers().expert_biases().into_iter();
        let biases: Vec<_> = biases.map(|(_, bias)| bits(bias.value())).collect();
        let checked = outcome.replay_cost.map(|cost| cost.checked.count);
        let state = trainer.state();
        Ok(format!(
            "{seen:?} {weights:?} {biases:?} {checked:?} {state:?}",
            seen = seen.0
        ))
    })
}

#[test]
fn a_run_without_a_hook_is_a_run_without_its_technique() {
    let techniques = techniques();
    let named: Vec<_> = techniques.iter().map(|(name, _)| *name).collect();
    // CUDA graphs need a GPU; a test beside them runs their hook on the CPU.
    let on_cpu = ORDER
        .into_iter()
        .filter(|name| !["your own hooks", "cuda_graphs"].contains(name));
    assert_eq!(named, on_cpu.collect::<Vec<_>>());
    for (name, case) in techniques {
        let [with, again, without] =
            [false, false, true].map(|removes| result(name, &case, removes));
        if name == "replica_check" {
            let (error, _) = (with.unwrap_err(), without.unwrap());
            assert!(error.contains("replica"), "{error}");
            continue;
        }
        let with = with.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(Ok(&with), again.as_ref(), "{name}");
        assert!(
            Ok(&with) != without.as_ref(),
            "{name} changes nothing: {with:?}"
        );
    }
}

#[test]
fn hooks_are_in_the_documented_order() {
    let case = llama("tp1", |case| {
        for (_, other) in techniques() {
            let (train, other) = (&mut case.train, other.train);
            train.batch_warmup.extend(other.batch_warmup);
            train.sequence_warmup.extend(other.sequence_warmup);
            train.skip_spikes = train.skip_spikes.or(other.skip_spikes);
            train.ema = train.ema.or(other.ema);
            train.qk_clip = train.qk_clip.or(other.qk_clip);
            train.count_zeros |= other.count_zeros;
            train.check_replay_every = train.check_replay_every.or(other.check_replay_every);
            train.check_replicas_every = train.check_replicas_every.or(other.check_replicas_every);
        }
    });
    let names = |case: &Case| {
        let trainer = case.trainer(&ParallelContext::single()).unwrap();
        let trainer = trainer.with_hook(Noted::default()).unwrap();
        let names = trainer.hook_names().into_iter().map(String::from);
        names.collect::<Vec<_>>()
    };
    let expected = [
        "batch_warmup",
        "sequence_warmup",
        "spikes",
        "replay",
        "zero_count",
        "qk_clip",
        "replica_check",
        "ema",
        "noted",
    ];
    assert_eq!(names(&case), expected);
    // A run without techniques has no hook.
    assert_eq!(names(&llama("tp1", |_| ())), ["noted"]);
}

/// What is called, in order.
type Calls = Arc<Mutex<Vec<&'static str>>>;

/// Notes the points at which it is called. `batches` is called whenever the plan is needed.
#[derive(Default)]
struct Noted {
    calls: Calls,
    batches: AtomicUsize,
    /// Skips this step.
    skips: Option<usize>,
    /// The steps so far, as a state.
    steps: u64,
}

impl Noted {
    fn note(&self, point: &'static str) {
        self.calls.lock().unwrap().push(point);
    }
}

impl<M: LanguageModel> StepHook<M> for Noted {
    fn name(&self) -> &str {
        "noted"
    }

    fn check(&self, context: &StepContext<'_, M>) -> Result<(), TrainError> {
        assert_eq!(context.step(), 1);
        self.note("check");
        Ok(())
    }

    fn batches(&self, plan: &mut BatchPlan) {
        assert_eq!(plan.row_length(0), SEQ);
        self.batches.fetch_add(1, Ordering::Relaxed);
    }

    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        assert_eq!(input.step + 1, context.step());
        self.note("wrap_run");
        let run = next.run(context, input);
        self.note("wrap_run ends");
        run
    }

    fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        self.note("statistics");
        let step = context.step() as f64;
        added.add("step", Tensor::from_data([step, 7.0], context.device()));
        Ok(())
    }

    fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        decision: &mut StepDecision<'_>,
        _: RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        self.note("decide");
        assert!(decision.is_valid(context) && decision.loss(context) > 0.0);
        if self.skips == Some(context.step()) {
            decision.skip(SkipReason::Spike);
        }
        Ok(())
    }

    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        _: &Gradients,
    ) -> Result<(), TrainError> {
        self.note("before_update");
        let skips = self.skips == Some(context.step());
        assert_eq!(update.launches(), !skips);
        let taken = update.taken().into_scalar::<f64>();
        assert_eq!(taken, if skips { 0.0 } else { 1.0 });
        Ok(())
    }

    fn after_update(
        &mut self,
        _: &mut StepContext<'_, M>,
        _: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        self.note("after_update");
        Ok(())
    }

    fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        self.note("metrics");
        self.steps += 1;
        assert_eq!(report.metrics.step, context.step());
        assert_eq!(report.added("step"), [context.step() as f64, 7.0]);
        Ok(())
    }

    fn before_evaluation(&mut self, _: &mut StepContext<'_, M>) {
        self.note("before_evaluation");
    }

    fn after_evaluation(&mut self, _: &mut StepContext<'_, M>) {
        self.note("after_evaluation");
    }

    fn save_state(&self, state: &mut RunState) {
        self.note("save_state");
        state.hooks.insert("noted".into(), self.steps.into());
    }

    fn load_state(
        &mut self,
        _: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        self.note("load_state");
        self.steps = state.unwrap().hooks["noted"].as_u64().unwrap();
        Ok(())
    }

    fn outcome(&self, _: &mut TrainOutcome) {
        self.note("outcome");
    }

    fn explain_skips(&self, _: usize, _: &TooManySkips) -> Option<TrainError> {
        self.note("explain_skips");
        Some(TrainError::OwnHook("it was noted".into()))
    }

    fn deferral_error(&self) -> Option<TrainError> {
        Some(TrainError::OwnHook("it reads each step".into()))
    }

    fn removed(&mut self, _: &mut StepContext<'_, M>) {
        self.note("removed");
    }
}

/// Notes when it gets the gradients.
struct NotedObserver(Calls);

impl Observer for NotedObserver {
    fn gradients(&mut self, _: &StepGradients<'_>) -> Result<(), ObserverError> {
        self.0.lock().unwrap().push("observer");
        Ok(())
    }

    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}

const STEP: [&str; 8] = [
    "wrap_run",
    "wrap_run ends",
    "statistics",
    "decide",
    "observer",
    "before_update",
    "after_update",
    "metrics",
];

#[test]
fn a_hook_of_the_user_is_called_at_each_point_in_the_order_of_the_docs() {
    let folder = Folder::new();
    let case = llama("dp2", |case| case.train.steps = 2);
    let run = |groups: &ParallelContext| {
        let calls = Calls::default();
        let hook = |skips| Noted {
            calls: calls.clone(),
            skips,
            ..Noted::default()
        };
        let mut trainer = case.trainer(groups)?.with_hook(hook(Some(2)))?;
        trainer.save_with(Saver::open(
            SaveConfig::into_folder(folder.join("run")),
            groups,
        )?);
        let outcome = trainer.fit(&Documents, &mut NotedObserver(calls.clone()))?;
        assert_eq!((outcome.steps, outcome.spikes), (2, 1));
        let noted: &Noted = trainer.hook().unwrap();
        assert!(noted.batches.load(Ordering::Relaxed) > 0);
        let _ = trainer.without_hook("noted")?;
        let ends = [
            "save_state",
            "before_evaluation",
            "after_evaluation",
            "outcome",
            "removed",
        ];
        let expected = [&["check"][..], &STEP, &STEP, &ends].concat();
        assert_eq!(*calls.lock().unwrap(), expected);

        let mut resumed = case.trainer(groups)?.with_hook(hook(None))?;
        let newest = folder.join("run").join("step-00000002");
        resumed.load(&Checkpoint::open(newest)?, LoadTolerance::default())?;
        assert_eq!(resumed.hook::<Noted>().unwrap().steps, 2);
        Ok(())
    };
    case.on_ranks(run).unwrap();
}

#[test]
fn a_hook_that_skips_every_step_gives_the_reason() {
    let case = llama("tp1", |case| {
        case.train.skip_limit = std::num::NonZeroU64::MIN
    });
    let trainer = case.trainer(&ParallelContext::single()).unwrap();
    let hook = Noted {
        skips: Some(1),
        ..Noted::default()
    };
    let mut trainer = trainer.with_hook(hook).unwrap();
    let error = trainer.step(&Documents, &mut NoopObserver).unwrap_err();
    assert_eq!(error.to_string(), "it was noted");
    let error = trainer.defer_readings(true).unwrap_err();
    assert_eq!(error.to_string(), "it reads each step");
}

#[test]
fn hooks_that_cannot_be_added_or_removed_are_refused() {
    let trainer = || {
        let case = llama("tp1", |case| case.train.count_zeros = true);
        case.trainer(&ParallelContext::single()).unwrap()
    };
    let Err(TrainError::Hook(error)) = trainer().without_hook("ema") else {
        panic!("there is no hook ema");
    };
    let expected = "this trainer has no hook ema: expected one of [zero_count]";
    assert_eq!(error.to_string(), expected);
    let twice = trainer().with_hook(Noted::default()).unwrap();
    let Err(TrainError::Hook(error)) = twice.with_hook(Noted::default()) else {
        panic!("there is a hook noted");
    };
    assert_eq!(error, HookError::Duplicate("noted".into()));
}

#[test]
fn a_trainer_without_graphs_runs_the_schedule() {
    let (subject, groups) = (FaultySubject::default(), ParallelContext::single());
    let config = TrainConfig {
        steps: 1,
        warmup_steps: 0,
        micro_batch_size: 2,
        global_batch_size: 4,
        data_parallel: DataParallelConfig {
            precision: Precision::F64,
            static_buffers: true,
            ..DataParallelConfig::default()
        },
        ..TrainConfig::default()
    };
    let run = |removes: bool| {
        let model = subject.build(&groups, &Device::flex()).unwrap();
        let ddp = subject.wrap(model, &groups, &config.data_parallel).unwrap();
        let trainer = Trainer::from_wrapped(ddp, &Device::flex(), &config).unwrap();
        let mut trainer = trainer.with_graphs_on_host().unwrap();
        assert_eq!(trainer.hook_names(), ["cuda_graphs"]);
        if removes {
            trainer = trainer.without_hook("cuda_graphs").unwrap();
        }
        let data = subject.data(&groups);
        let metrics = trainer.step(&*data, &mut NoopObserver).unwrap();
        assert!(metrics.loss.is_finite());
        trainer.cuda_graphs().is_some()
    };
    assert_eq!([false, true].map(run), [true, false]);
}
