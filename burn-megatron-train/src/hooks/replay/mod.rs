//! Replay checks, which check a step by computing it again.
//!
//! Every [`check_replay_every`](crate::TrainConfig::check_replay_every) steps, the forward pass, the backward pass and
//! the gradient reduction of a step run twice from the same state. Random numbers are counter-based, and the FP8 amax
//! values that a forward pass changes are restored. Therefore both runs give bit-identical results unless a fault
//! occurs. The results that differ are found by comparing their [fingerprints](burn_megatron::fingerprint). A third run
//! distinguishes a transient fault from a program that is not deterministic.
//!
//! A fault before both runs, such as a flipped bit in a weight, affects both runs in the same way. Such faults are
//! found by comparing fingerprints of the state between steps, and between ranks that hold the same state.

use std::sync::Arc;
use std::time::Instant;

use super::{RemainingHooks, StepContext, StepDecision, StepHook, StepInput, StepRun, StepUpdate};
use crate::{TrainConfig, TrainError, TrainOutcome};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::comm::{CommError, ParallelContext, ReduceOp, all_gather_bytes};
use burn_megatron::fingerprint::{Event, Recorder, Site};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::fp8::Fp8Snapshot;
use burn_megatron::optim::TooManySkips;
use burn_megatron_comm_testing::fault_injection::FaultPlan;

mod attribute;
mod bad_loss;
mod compare;
mod cost;
mod faults;
mod flip;
mod replicas;
mod state;
mod verdict;

use attribute::{Origin, attribute};
use bad_loss::BadLoss;
use compare::{Comparison, Difference, compare};
pub use cost::{MeanTime, ReplayCost};
use state::StateFingerprints;
pub use verdict::{ReplayError, Verdict};

/// The name of the hook.
pub(super) const NAME: &str = "replay";

/// The hook of [`check_replay_every`](TrainConfig::check_replay_every) and of injected bit flips.
#[derive(Default)]
pub(crate) struct Replay {
    /// The number of steps between two replayed steps; `None` if nothing is checked.
    every: Option<usize>,
    faults: Option<Arc<FaultPlan>>,
    /// The fingerprints of the state after the last step.
    state: Option<StateFingerprints>,
    /// Whether the trainer has run a step. The first step records the order in which parameters are gathered.
    has_run: bool,
    cost: ReplayCost,
    /// Whether the last bad loss was the same on another rank.
    is_bad_elsewhere: bool,
    /// The state of the FP8 layers before the step, kept until the step is decided.
    fp8_before: Option<Fp8Snapshot>,
}

/// The results of a comparison, reduced over all ranks with the maximum.
const EQUAL: i32 = 0;
const OTHER_OPERATIONS: i32 = 1;
const DIFFER: i32 = 2;

impl<M: LanguageModel> StepHook<M> for Replay {
    fn name(&self) -> &str {
        NAME
    }

    /// Runs a step, and checks it if a check is due.
    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        self.begin_state(context);
        self.fp8_before = self.checks().then(|| context.ddp.fp8().snapshot());
        self.checked_run(context, input, &mut next)
    }

    /// Computes a step again if its loss is bad.
    fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        decision: &mut StepDecision<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        let Some(fp8) = self.fp8_before.take() else {
            return Ok(());
        };
        match bad_loss::fault(decision, context) {
            Some(what) => {
                let bad = BadLoss {
                    decision,
                    fp8: &fp8,
                    what,
                };
                self.examine(context, &bad, &mut next)
            }
            None => Ok(()),
        }
    }

    fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        _: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        self.end_state(context);
        Ok(())
    }

    /// Compares the state between ranks, so that no checkpoint contains a differing state.
    fn before_save(&mut self, context: &mut StepContext<'_, M>) -> Result<(), TrainError> {
        self.check_state(context, context.step)
    }

    /// Drops the fingerprints, because the state is replaced.
    fn load_state(
        &mut self,
        _: &mut StepContext<'_, M>,
        _: Option<&RunState>,
    ) -> Result<(), TrainError> {
        self.state = None;
        Ok(())
    }

    fn outcome(&self, outcome: &mut TrainOutcome) {
        if self.checks() {
            outcome.replay_cost = Some(self.cost);
            let verdict = Verdict::DataOrSoftware;
            outcome.bad_loss = self.is_bad_elsewhere.then_some(verdict);
        }
    }

    fn explain_skips(&self, step: usize, skips: &TooManySkips) -> Option<TrainError> {
        let error = || ReplayError {
            step,
            verdict: Verdict::DataOrSoftware,
            message: format!("{skips}; they are the same on another data-parallel rank"),
        };
        self.is_bad_elsewhere.then(|| error().into())
    }

    fn deferral_error(&self) -> Option<TrainError> {
        self.checks().then_some(TrainError::Deferred {
            setting: "check_replay_every",
        })
    }
}

impl Replay {
    /// Creates the hook of a run that checks steps; `None` if the run checks none.
    pub fn new(config: &TrainConfig) -> Option<Self> {
        let every = config.check_replay_every;
        every.map(|_| Self {
            every,
            ..Self::default()
        })
    }

    /// Returns whether steps are checked by computing them again.
    fn checks(&self) -> bool {
        self.every.is_some()
    }

    /// Runs a step. Also returns its recorded results, if `records` is set.
    fn observed_run<M: LanguageModel>(
        &self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        next: &mut RemainingHooks<'_, M>,
        records: bool,
    ) -> Result<(StepRun, Vec<Event>), TrainError> {
        if !records && self.faults.is_none() {
            return Ok((next.run(context, input)?, vec![]));
        }
        let faults = self.faults.clone();
        let corruption = faults.map(|faults| flip::corruption(faults, context.groups().rank()));
        let recorder = Recorder::new(records, corruption);
        let run = recorder.watch(|| next.run(context, input))?;
        if records {
            recorder.losses(&run.losses.losses);
        }
        Ok((run, recorder.take()))
    }

    /// Runs the forward, backward and reduction of a step. If a check is due, runs them again and compares the results.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks if the results differ.
    fn checked_run<M: LanguageModel>(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        next: &mut RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        let step = input.step + 1;
        let is_due = self.every.is_some_and(|every| step.is_multiple_of(every));
        let has_run = std::mem::replace(&mut self.has_run, true);
        let began = Instant::now();
        if !is_due {
            let (run, _) = self.observed_run(context, input, next, false)?;
            if self.checks() {
                // The next reading reports the error.
                let _ = context.device.sync();
                self.cost.plain.add(began);
            }
            self.check_state(context, step)?;
            return Ok(run);
        }
        let _span = tracing::info_span!("check_replay", step).entered();
        let before = context.ddp.fp8().snapshot();
        if !has_run {
            // The first run records the order in which parameters are gathered, which changes the calls of the next
            // run.
            self.observed_run(context, input, next, false)?;
            context.ddp.fp8().restore(&before);
        }
        context.ddp.reshard();
        // An evaluation may have quantized weights. Both runs must quantize them, so that they make the same calls.
        context.ddp.fp8().invalidate_weights();
        let (first, a) = self.observed_run(context, input, next, true)?;
        // Frees memory for the second run.
        drop(first);
        let after = context.ddp.fp8().snapshot();
        context.ddp.fp8().restore(&before);
        let (run, b) = self.observed_run(context, input, next, true)?;
        context.ddp.fp8().restore(&after);
        self.cost.checked.add(began);
        self.check_state(context, step)?;
        let differing = match over_all_ranks(&compare(&a, &b), context.groups())? {
            EQUAL => return Ok(run),
            differing => differing,
        };
        drop(run);
        context.ddp.fp8().restore(&before);
        let (_, c) = self.observed_run(context, input, next, true)?;
        Err(verdict(step, [&a, &b, &c], differing, context.groups())?.into())
    }
}

/// Returns the verdict on three runs. The first two runs differ.
fn verdict(
    step: usize,
    [a, b, c]: [&[Event]; 3],
    differing: i32,
    groups: &ParallelContext,
) -> Result<ReplayError, TrainError> {
    let first_agrees = over_all_ranks(&compare(a, c), groups)? == EQUAL;
    let second_agrees = over_all_ranks(&compare(b, c), groups)? == EQUAL;
    let (verdict, wrong, right) = match (first_agrees, second_agrees) {
        (false, true) => (Verdict::Transient, a, c),
        (true, false) => (Verdict::Transient, b, c),
        _ => (Verdict::NotDeterministic, a, b),
    };
    let what = match origins(&compare(right, wrong), groups)? {
        Ok(origins) if !origins.is_empty() => {
            let origins: Vec<_> = origins.iter().map(ToString::to_string).collect();
            origins.join("; ")
        }
        Ok(_) if differing == OTHER_OPERATIONS => "the runs have different operations".into(),
        Ok(_) => "no recorded operation returned the difference first".into(),
        Err(other) => other,
    };
    let message = match verdict {
        Verdict::Transient => format!(
            "of three runs from one state, the {} differs from the two others: {what}",
            if first_agrees { "second" } else { "first" }
        ),
        _ => format!("three runs from one state all differ: {what}"),
    };
    Ok(ReplayError {
        step,
        verdict,
        message,
    })
}

/// Returns the comparison of two runs as a number, the maximum over all ranks. Collective: call on all ranks of the
/// world.
fn over_all_ranks(comparison: &Comparison, groups: &ParallelContext) -> Result<i32, CommError> {
    let own = match comparison {
        Comparison::Equal => EQUAL,
        Comparison::OtherOperations { .. } => OTHER_OPERATIONS,
        Comparison::Differ(_) => DIFFER,
    };
    groups.world().all_reduce_scalar(own, ReduceOp::Max)
}

/// Returns the origins of the differences, or a text about operations that only one run has. Collective: call on all
/// ranks of the world.
fn origins(
    comparison: &Comparison,
    groups: &ParallelContext,
) -> Result<Result<Vec<Origin>, String>, CommError> {
    let (differences, other): (&[Difference], _) = match comparison {
        Comparison::Equal => (&[], None),
        Comparison::Differ(differences) => (differences, None),
        Comparison::OtherOperations { first, second } => {
            let name = |site: &Option<Site>| match site {
                Some(site) => site.to_string(),
                None => "the end".into(),
            };
            let (rank, first, second) = (groups.rank(), name(first), name(second));
            let text = format!("on rank {rank} one has {first} where the other has {second}");
            (&[], Some(text))
        }
    };
    let all: Vec<(Vec<Difference>, Option<String>)> = gather(&(differences, other), groups)?;
    let (differences, others): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    let origins = attribute(&differences);
    Ok(match others.into_iter().flatten().next() {
        Some(other) if origins.is_empty() => Err(other),
        _ => Ok(origins),
    })
}

/// Gathers a value of each rank, in the order of the ranks. Collective: call on all ranks of the world.
fn gather<S: serde::Serialize, T: serde::de::DeserializeOwned>(
    own: &S,
    groups: &ParallelContext,
) -> Result<Vec<T>, CommError> {
    let failed = |error: serde_json::Error| CommError::Engine {
        engine: "replay".into(),
        message: error.to_string(),
    };
    let own = serde_json::to_vec(own).map_err(failed)?;
    let all = all_gather_bytes(&**groups.world(), &own)?;
    let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
    all.collect::<Result<_, _>>().map_err(failed)
}
