//! Runs a schedule on one rank.
//!
//! Each forward builds a graph of its own, from the received activation to the stage's output. The
//! output is sent and freed while its graph lives; the backward starts from the gradient that comes
//! back. Weight gradients of linear layers can be put off to an action of their own.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use burn::tensor::{Device, Gradients, Tensor};

use super::schedule::{Action, ActionKind, Invalid, Schedule, validate};
use crate::collective::Comm;
use crate::comm::CommError;
use crate::nn::door::DeferringSink;

mod ends;
mod forward_only;
mod link;
mod seed;
mod state;
#[cfg(test)]
mod tests;

pub use forward_only::forward_only;
use state::State;

/// What runs the stages of one rank.
pub trait Stage {
    /// Runs a stage on a micro-batch. `input` is the activation of the stage before, tracked; the
    /// first stage has none.
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> Output;

    /// Called after the backward of a stage, with the gradients of leaves that the stage made.
    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        let _ = (stage, micro_batch, leaves);
    }
}

/// What a stage gives.
pub enum Output {
    /// The input of the next stage: `[batch, seq, hidden]`.
    Activation(Tensor<3>),
    /// The loss of the micro-batch, summed over its tokens: the last stage.
    Loss(Tensor<1>),
}

/// One action as it was run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Event {
    /// The action.
    pub action: Action,
    /// When it began.
    pub start: Instant,
    /// When it ended.
    pub end: Instant,
}

/// What one rank saw of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The sum of the losses of the micro-batches; zero where the last stage is elsewhere.
    pub loss: f64,
    /// What was run, in order.
    pub events: Vec<Event>,
    /// The most activations that were kept at once, over all stages of this rank, as
    /// [`Report::peak_activations`](super::schedule::Report::peak_activations) counts them.
    pub peak_activations: usize,
}

/// A schedule that cannot be run, or did not run to its end.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The schedule breaks a rule.
    #[error(transparent)]
    Invalid(Box<Invalid>),
    /// The schedule is for another number of ranks.
    #[error("the schedule is for {schedule} ranks, the pipeline has {pipeline}")]
    Ranks {
        /// The ranks of the schedule.
        schedule: usize,
        /// The ranks of the pipeline axis.
        pipeline: usize,
    },
    /// What was sent did not arrive.
    #[error("pipeline rank {rank}, sending: {source}")]
    Sends {
        /// The rank of the pipeline axis.
        rank: usize,
        /// What went wrong.
        source: Box<CommError>,
    },
    /// An action failed.
    #[error("pipeline rank {rank}, {}: {source}", action.describe())]
    Action {
        /// The rank of the pipeline axis.
        rank: usize,
        /// The action at which it stopped.
        action: Action,
        /// What went wrong.
        source: Box<CommError>,
    },
    /// A stage panicked.
    #[error("pipeline rank {rank}, {}: panicked: {message}", action.describe())]
    Panic {
        /// The rank of the pipeline axis.
        rank: usize,
        /// The action in which it panicked.
        action: Action,
        /// The message of the panic.
        message: String,
    },
}

impl EngineError {
    /// What a stage unwound with: an error that was [raised](crate::comm::raise), or a panic.
    fn unwound(rank: usize, action: Action, payload: Box<dyn Any + Send>) -> Self {
        let payload = match payload.downcast::<CommError>() {
            Ok(source) => {
                return Self::Action {
                    rank,
                    action,
                    source,
                };
            }
            Err(payload) => payload,
        };
        let text = payload.downcast_ref::<&str>().map(ToString::to_string);
        let message = text
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "with a payload that is no text".into());
        Self::Panic {
            rank,
            action,
            message,
        }
    }
}

/// Runs the schedule of one rank.
pub struct Engine<'a> {
    schedule: &'a Schedule,
    comm: &'a Comm,
    device: Device,
    sink: &'a dyn DeferringSink,
    put_off: Option<PutOff>,
}

/// A weight whose gradient the last stage puts off to the cool-down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutOff {
    /// The index of the weight in the table.
    pub index: usize,
    /// The most gradients that are put off at once; 0 puts off all.
    pub limit: usize,
}

impl<'a> Engine<'a> {
    /// An engine for the ranks of `comm`, whose parameters hand their gradients to `sink`.
    ///
    /// # Errors
    ///
    /// [`EngineError`] for a schedule that breaks a rule, or is for another number of ranks.
    pub fn new(
        schedule: &'a Schedule,
        comm: &'a Comm,
        device: &Device,
        sink: &'a dyn DeferringSink,
    ) -> Result<Self, EngineError> {
        validate(schedule).map_err(|invalid| EngineError::Invalid(Box::new(invalid)))?;
        if schedule.ranks() != comm.size() {
            return Err(EngineError::Ranks {
                schedule: schedule.ranks(),
                pipeline: comm.size(),
            });
        }
        let device = device.clone().inner();
        Ok(Self {
            schedule,
            comm,
            device,
            sink,
            put_off: None,
        })
    }

    /// Lets the last stage put off the gradient of one weight, the output layer's, until its rank
    /// has done all else, while the ranks before it are still at their last backwards. The bits
    /// stay the same. Meanwhile the inputs and the gradients of that layer are kept.
    pub fn with_put_off(mut self, put_off: Option<PutOff>) -> Self {
        self.put_off = put_off;
        self
    }

    /// Runs all actions of this rank.
    ///
    /// # Errors
    ///
    /// [`EngineError::Action`] names the action in which another rank was found missing, or in which
    /// a stage [raised](crate::comm::raise) an error; [`EngineError::Panic`] that in which one
    /// panicked.
    pub fn run(&self, model: &impl Stage) -> Result<Run, EngineError> {
        let mut state = State::new(
            self.schedule,
            self.comm,
            &self.device,
            self.sink,
            self.put_off,
        );
        let mut events = vec![];
        let mut closes = ends::stage_closes(self.schedule, self.comm.rank());
        let last = self.schedule.stages() - 1;
        let put_off = self.put_off.map(|_| last);
        let put_off = put_off.filter(|_| self.schedule.rank_of(last) == self.comm.rank());
        for (position, action) in self.schedule.actions(self.comm.rank()).iter().enumerate() {
            let start = Instant::now();
            self.naming(action, || state.perform(action, model))?;
            events.push(Event {
                action: *action,
                start,
                end: Instant::now(),
            });
            for stage in closes.remove(&position).unwrap_or_default() {
                self.naming(action, || {
                    self.sink.close_stage(stage);
                    Ok(())
                })?;
            }
        }
        if let Some(stage) = put_off {
            let micro_batch = self.schedule.micro_batches() - 1;
            let action = Action::new(ActionKind::WeightGradient, stage, micro_batch);
            self.naming(&action, || {
                state.compute_put_off();
                Ok(())
            })?;
        }
        state.finish().map_err(|source| EngineError::Sends {
            rank: self.comm.rank(),
            source: Box::new(source),
        })?;
        Ok(Run {
            loss: state.loss(),
            peak_activations: state.peak_activations(),
            events,
        })
    }

    /// Does a part of an action, and names the action where that fails.
    fn naming(
        &self,
        action: &Action,
        work: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<(), EngineError> {
        let rank = self.comm.rank();
        let _span = tracing::debug_span!("action", %action).entered();
        // After an unwinding the state is dropped, so that nothing half done is seen.
        let done = catch_unwind(AssertUnwindSafe(work));
        let done = done.map_err(|payload| EngineError::unwound(rank, *action, payload))?;
        done.map_err(|source| EngineError::Action {
            rank,
            action: *action,
            source: Box::new(source),
        })
    }
}
