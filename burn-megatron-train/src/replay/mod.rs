//! Checks of a step by computing it again.
//!
//! Every [`check_replay_every`](super::TrainConfig::check_replay_every) steps the forwards, the backwards and the reduction
//! of a step run twice from one state. All random numbers are counter-based, and what else a forward changes (the
//! magnitudes of FP8 layers) is restored, so both runs compute the same bits; [fingerprints](burn_megatron::fingerprint) tell what
//! does not. A third run tells a transient fault from a program that is not deterministic. What is changed before both
//! runs, such as a flipped bit of a weight, repeats in them: it is found by fingerprints of the state between the steps, and
//! of that of ranks which hold the same.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Tensor;

use super::micro_batches::StepLosses;
use super::{TrainError, Trainer, Verdict};
use burn_megatron::comm::testing::fault_injection::FaultPlan;
use burn_megatron::comm::{CommError, ReduceOp, all_gather_bytes};
use burn_megatron::data_parallel::{Gradients, ReductionRecord};
use burn_megatron::fingerprint::{
    Comparison, Difference, Event, Origin, Recorder, Site, attribute, compare,
};
use burn_megatron::model::LanguageModel;
use burn_megatron_data::Batch;

mod bad_loss;
mod cost;
mod replicas;
mod state;

pub(super) use bad_loss::BadLoss;
pub use cost::{MeanTime, ReplayCost};
use state::StateFingerprints;

/// A check of a step found a wrong result. The same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step}: {verdict}: {message}")]
pub struct ReplayError {
    /// The step, from 1.
    pub step: usize,
    /// The verdict.
    pub verdict: Verdict,
    /// The difference, with its rank, layer and tensor.
    pub message: String,
}

/// The state that a trainer keeps for the checks.
#[derive(Default)]
pub(super) struct Replay {
    faults: Option<Arc<FaultPlan>>,
    /// The fingerprints of the state after the last step.
    state: Option<StateFingerprints>,
    /// Whether the trainer has run a step: the first one learns the order in which parameters are gathered.
    has_run: bool,
    pub(super) cost: ReplayCost,
    /// Whether the last bad loss was the same on another rank.
    pub(super) is_bad_elsewhere: bool,
}

/// The input of a step.
#[derive(Clone)]
pub(super) struct StepInput<'a> {
    pub batches: &'a [Batch],
    /// From 0.
    pub step: usize,
    /// The index on the data axis of the rank whose batches they are.
    pub data_rank: usize,
    pub loss_scale: Option<Tensor<1>>,
}

/// The result of the forwards, the backwards and the reduction.
pub(super) struct StepRun {
    pub losses: StepLosses,
    pub attention_logits: Option<Tensor<1>>,
    pub gradients: Gradients,
    pub record: ReductionRecord,
}

/// The ways in which two runs compare, over all ranks; the larger one counts.
const EQUAL: i32 = 0;
const OTHER_OPERATIONS: i32 = 1;
const DIFFER: i32 = 2;

impl<M: LanguageModel> Trainer<M> {
    /// Flips the bits that `faults` name. The plan must be that of the communicators, by which it knows the step.
    pub fn inject(&mut self, faults: Arc<FaultPlan>) {
        self.replay.faults = Some(faults);
    }

    /// Whether steps are checked by computing them again.
    pub(super) fn checks_replay(&self) -> bool {
        self.config.check_replay_every.is_some()
    }

    /// The forwards, the backwards and the reduction of a step.
    fn run_step(&mut self, input: &StepInput<'_>) -> Result<StepRun, TrainError> {
        if !self.attention.is_empty() {
            self.ddp.attention_logits().begin_step();
        }
        let losses = self.run_batches(input)?;
        let attention_logits = self.reduced_logits();
        let (gradients, record) = self.ddp.reduce_unscaled()?;
        Ok(StepRun {
            losses,
            attention_logits,
            gradients,
            record,
        })
    }

    /// The same with what it computes, if `records`.
    fn observed_run(
        &mut self,
        input: &StepInput<'_>,
        records: bool,
    ) -> Result<(StepRun, Vec<Event>), TrainError> {
        let faults = self.replay.faults.clone();
        if !records && faults.is_none() {
            return Ok((self.run_step(input)?, vec![]));
        }
        let recorder = Recorder::new(self.ddp.groups().rank(), records, faults);
        let run = recorder.watch(|| self.run_step(input))?;
        if records {
            recorder.losses(&run.losses.losses);
        }
        Ok((run, recorder.take()))
    }

    /// The forwards, the backwards and the reduction of a step; where it is due, checked by running them again.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks for a difference.
    pub(super) fn checked_run(&mut self, input: &StepInput<'_>) -> Result<StepRun, TrainError> {
        let step = input.step + 1;
        let every = self.config.check_replay_every;
        let is_due = every.is_some_and(|every| step.is_multiple_of(every));
        let has_run = std::mem::replace(&mut self.replay.has_run, true);
        let began = Instant::now();
        if !is_due {
            let (run, _) = self.observed_run(input, false)?;
            if self.checks_replay() {
                // An error is that of the next reading.
                let _ = self.device.sync();
                self.replay.cost.plain.add(began);
            }
            self.check_state(step)?;
            return Ok(run);
        }
        let _span = tracing::info_span!("check_replay", step).entered();
        let before = self.ddp.fp8().snapshot();
        if !has_run {
            // It learns the order in which parameters are gathered, which changes the calls of the next one.
            self.observed_run(input, false)?;
            self.ddp.fp8().restore(&before);
        }
        self.ddp.reshard();
        let (first, a) = self.observed_run(input, true)?;
        // The second run needs the memory.
        drop(first);
        let after = self.ddp.fp8().snapshot();
        self.ddp.fp8().restore(&before);
        let (run, b) = self.observed_run(input, true)?;
        self.ddp.fp8().restore(&after);
        self.replay.cost.checked.add(began);
        self.check_state(step)?;
        let differing = match self.over_all_ranks(&compare(&a, &b))? {
            EQUAL => return Ok(run),
            differing => differing,
        };
        drop(run);
        self.ddp.fp8().restore(&before);
        let (_, c) = self.observed_run(input, true)?;
        Err(self.verdict(step, [&a, &b, &c], differing)?.into())
    }

    /// Returns the verdict on three runs, of which the first two differ.
    fn verdict(
        &self,
        step: usize,
        [a, b, c]: [&[Event]; 3],
        differing: i32,
    ) -> Result<ReplayError, TrainError> {
        let first_agrees = self.over_all_ranks(&compare(a, c))? == EQUAL;
        let second_agrees = self.over_all_ranks(&compare(b, c))? == EQUAL;
        let (verdict, wrong, right) = match (first_agrees, second_agrees) {
            (false, true) => (Verdict::Transient, a, c),
            (true, false) => (Verdict::Transient, b, c),
            _ => (Verdict::NotDeterministic, a, b),
        };
        let what = match self.origins(&compare(right, wrong))? {
            Ok(origins) if !origins.is_empty() => {
                let origins: Vec<_> = origins.iter().map(ToString::to_string).collect();
                origins.join("; ")
            }
            Ok(_) if differing == OTHER_OPERATIONS => "its runs are of other operations".into(),
            Ok(_) => "no recorded operation returned it first".into(),
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

    /// The largest difference between two runs on any rank. Collective: call on all ranks of the world.
    fn over_all_ranks(&self, comparison: &Comparison) -> Result<i32, CommError> {
        let own = match comparison {
            Comparison::Equal => EQUAL,
            Comparison::OtherOperations { .. } => OTHER_OPERATIONS,
            Comparison::Differ(_) => DIFFER,
        };
        let world = self.ddp.groups().world();
        world.all_reduce_scalar(own, ReduceOp::Max)
    }

    /// The origins of what differs, or the operations that only one run has. Collective: call on all ranks of the world.
    fn origins(&self, comparison: &Comparison) -> Result<Result<Vec<Origin>, String>, CommError> {
        let (differences, other): (&[Difference], _) = match comparison {
            Comparison::Equal => (&[], None),
            Comparison::Differ(differences) => (differences, None),
            Comparison::OtherOperations { first, second } => {
                let name = |site: &Option<Site>| match site {
                    Some(site) => site.to_string(),
                    None => "the end".into(),
                };
                let (rank, first, second) = (self.ddp.groups().rank(), name(first), name(second));
                let text = format!("on rank {rank} one has {first} where the other has {second}");
                (&[], Some(text))
            }
        };
        let all: Vec<(Vec<Difference>, Option<String>)> = self.gather(&(differences, other))?;
        let (differences, others): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let origins = attribute(&differences);
        Ok(match others.into_iter().flatten().next() {
            Some(other) if origins.is_empty() => Err(other),
            _ => Ok(origins),
        })
    }

    /// A value of each rank, in the order of the ranks. Collective: call on all ranks of the world.
    fn gather<S: serde::Serialize, T: serde::de::DeserializeOwned>(
        &self,
        own: &S,
    ) -> Result<Vec<T>, CommError> {
        let failed = |error: serde_json::Error| CommError::Engine {
            engine: "replay".into(),
            message: error.to_string(),
        };
        let own = serde_json::to_vec(own).map_err(failed)?;
        let all = all_gather_bytes(&**self.ddp.groups().world(), &own)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        all.collect::<Result<_, _>>().map_err(failed)
    }
}
