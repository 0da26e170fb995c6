//! Tests the hooks of a step. Each hook changes the run of its technique, and all points are called in the documented
//! order.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use burn::tensor::{Device, Tensor};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::checkpoint::{Checkpoint, LoadTolerance};
use burn_megatron::comm::ParallelContext;
use burn_megatron::data_parallel::{DataParallelConfig, Gradients, Precision};
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::TooManySkips;
use burn_megatron_train::hooks::{
    AddedStatistics, BatchPlan, HookError, RemainingHooks, StepContext, StepDecision, StepHook,
    StepInput, StepReport, StepRun, StepUpdate,
};
use burn_megatron_train::metrics::{HeldOutMetrics, SkipReason, StepMetrics, StepTiming};
use burn_megatron_train::{
    NoopObserver, Observer, ObserverError, SaveConfig, Saver, StepGradients, TrainConfig,
    TrainError, TrainOutcome, Trainer,
};
use burn_megatron_verify::Subject;
use burn_megatron_verify::faults::decoder::FaultySubject;

use crate::resume::run::{Case, Folder};
use techniques::{Documents, llama, techniques};

mod techniques;

const SEQ: usize = 16;
const STEPS: usize = 6;

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
    // A run without techniques has only this hook.
    assert_eq!(names(&llama("tp1", |_| ())), ["noted"]);
}

/// The calls, in order.
type Calls = Arc<Mutex<Vec<&'static str>>>;

/// Records the points at which the hook is called. `batches` is called whenever the plan is needed.
#[derive(Default)]
struct Noted {
    calls: Calls,
    batches: AtomicUsize,
    /// The step to skip.
    skips: Option<usize>,
    /// The number of steps so far, as the state of the hook.
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

/// Records when the observer receives the gradients.
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
