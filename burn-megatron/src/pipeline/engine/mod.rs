//! The engine that runs a schedule on one rank. The main entry point is [`Engine`].
//!
//! Each forward of a stage builds its own autodiff graph, from the activation that was received to the output of the
//! stage. The output is sent to the next stage and freed, while the graph is kept for the backward. The backward starts
//! from the gradient of the output, which is received from the next stage. The weight gradients of linear layers can be
//! deferred to a separate action.
//!
//! The schedule can [pair](ActionKind::PairedForward) the forward of a micro-batch with the backward of another
//! micro-batch. A paired forward and backward alternate: both are divided into nodes, and the engine switches between
//! them after each node. While one of them waits for communication, the other computes. See [`Stage::forward_nodes`].

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{Device, Gradients, Tensor};

use super::schedule::{Action, ActionKind, InvalidSchedule, Schedule, validate};
use crate::collective::Comm;
use crate::comm::CommError;
use crate::nn::hook::DeferringSink;
use crate::nn::schedule_nodes::NodeRun;
use crate::nn::{LossFactor, ScheduleNodes};

mod forward_only;
mod p2p;
mod state;
#[cfg(test)]
mod tests;

pub use forward_only::{ForwardOptions, forward_only};
use p2p::P2pCommunicator;
pub use p2p::{P2pConfig, ShapeCache, ShapeKey};
use state::EngineState;

/// The pipeline stages of one rank, which the [`Engine`] runs.
pub trait Stage {
    /// Runs the forward of a stage on a micro-batch. `input` is the output of the previous stage, which autodiff
    /// tracks, or `None` for the first stage.
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput;

    /// Runs [`forward`](Self::forward) on a rank whose schedule pairs forwards with backwards. A stage passes `nodes`
    /// to each layer that exchanges rows of activations between ranks. Such a layer ends a node at each exchange. By
    /// default the complete forward is one node. The results are bitwise equal to the results of
    /// [`forward`](Self::forward).
    fn forward_nodes(
        &self,
        stage: usize,
        micro_batch: usize,
        input: Option<Tensor<3>>,
        nodes: &ScheduleNodes,
    ) -> StageOutput {
        let _ = nodes;
        self.forward(stage, micro_batch, input)
    }

    /// Returns the key that identifies the shapes of a micro-batch, such as `[batch, seq]` of its tokens. The key must
    /// be the same on all ranks and must be known before the forward. For all micro-batches with the same key, a stage
    /// must return activations of the same shape. By default all micro-batches have the same key.
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        let _ = micro_batch;
        ShapeKey::default()
    }

    /// Is called after the backward of a stage, with the gradients of the leaf tensors that the stage created.
    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        let _ = (stage, micro_batch, leaves);
    }
}

/// The result of the forward of a stage.
pub enum StageOutput {
    /// The activation that is the input of the next stage: `[batch, seq, hidden]`.
    Activation(Tensor<3>),
    /// The loss of the micro-batch, summed over its tokens. The last stage returns it.
    Loss(Tensor<1>),
}

/// An action with its measured times. A paired forward and backward alternate, so each of them has several events.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActionEvent {
    /// The action that was run.
    pub action: Action,
    /// The time at which the action, or the part of the action, started.
    pub start: Instant,
    /// The time at which the action, or the part of the action, ended.
    pub end: Instant,
}

/// The result of [`Engine::run`] on one rank.
#[derive(Clone, Debug)]
pub struct EngineRun {
    /// The losses of the micro-batches, without autodiff. Each loss has the shape `[1]`. The list is empty on ranks
    /// without the last stage.
    pub losses: Vec<Tensor<1>>,
    /// The events of all actions, in the order in which they ran.
    pub events: Vec<ActionEvent>,
    /// The peak number of stage activations that were in memory on this rank. Stage activations are counted like
    /// [`ActivationReport::peak_activations`](super::schedule::ActivationReport::peak_activations).
    pub peak_activations: usize,
}

impl EngineRun {
    /// Reads the losses from the device and returns their sum. The sum is 0 on ranks without the last stage.
    pub fn loss(&self) -> f64 {
        let losses = self.losses.iter();
        losses.map(|loss| loss.clone().into_scalar::<f64>()).sum()
    }
}

/// The error for a schedule that cannot be run, or for a run that failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The schedule violates a rule of valid schedules.
    #[error(transparent)]
    Invalid(Box<InvalidSchedule>),
    /// The schedule and the pipeline axis have different numbers of ranks.
    #[error("the schedule is for {schedule} ranks, but the pipeline has {pipeline}")]
    Ranks {
        /// The number of ranks of the schedule.
        schedule: usize,
        /// The number of ranks of the pipeline axis.
        pipeline: usize,
    },
    /// Neighboring ranks have micro-batches with different shape keys, or a neighboring rank cannot be reached.
    #[error("pipeline rank {rank}, before the first action: {source}")]
    Begin {
        /// The rank on the pipeline axis.
        rank: usize,
        /// The cause.
        source: Box<CommError>,
    },
    /// A send did not complete.
    #[error("pipeline rank {rank}, sending: {source}")]
    Send {
        /// The rank on the pipeline axis.
        rank: usize,
        /// The cause.
        source: Box<CommError>,
    },
    /// An action failed.
    #[error("pipeline rank {rank}, {}: {source}", action.describe())]
    Action {
        /// The rank on the pipeline axis.
        rank: usize,
        /// The failed action.
        action: Action,
        /// The cause.
        source: Box<CommError>,
    },
    /// The code of a stage panicked.
    #[error("pipeline rank {rank}, {}: panicked: {message}", action.describe())]
    Panic {
        /// The rank on the pipeline axis.
        rank: usize,
        /// The action that panicked.
        action: Action,
        /// The panic message.
        message: String,
    },
}

impl EngineError {
    /// Converts the payload of a panic: an error that was [raised](crate::comm::raise), or a panic message.
    fn from_panic(rank: usize, action: Action, payload: Box<dyn Any + Send>) -> Self {
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
            .unwrap_or_else(|| "payload is not a string".into());
        Self::Panic {
            rank,
            action,
            message,
        }
    }
}

/// Executes the schedule of one rank.
pub struct Engine<'a> {
    schedule: &'a Schedule,
    comm: &'a Comm,
    device: Device,
    sink: Arc<dyn DeferringSink>,
    deferred_wgrad: Option<DeferredWgrad>,
    loss_scale: LossFactor,
    p2p: P2pConfig,
    shapes: ShapeCache,
}

/// A weight of the last stage whose gradient is computed in the cool-down phase of the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredWgrad {
    /// The index of the weight in the parameter table.
    pub index: usize,
    /// The maximum number of gradients that are deferred at the same time. 0 means that the number is not limited.
    pub limit: usize,
}

/// Returns the events of a pair. `runs` are the times of the backward, and the forward ran in between.
fn events_of_pair(forward: &Action, backward: &Action, runs: &[NodeRun]) -> Vec<ActionEvent> {
    let event = |action: &Action, [start, end]: NodeRun| ActionEvent {
        action: *action,
        start,
        end,
    };
    let between = runs.windows(2).map(|two| [two[0][1], two[1][0]]);
    let forwards = between.map(Some).chain([None]);
    let in_turn = runs.iter().zip(forwards).flat_map(|(run, between)| {
        let between = between.map(|between| event(forward, between));
        [Some(event(backward, *run)), between]
    });
    in_turn.flatten().collect()
}

impl<'a> Engine<'a> {
    /// Creates an engine that runs a schedule on the ranks of `comm`. The gradients of parameters are passed to `sink`.
    ///
    /// # Errors
    ///
    /// [`EngineError::Invalid`] for an invalid schedule, and [`EngineError::Ranks`] if the schedule is for another
    /// number of ranks.
    pub fn new(
        schedule: &'a Schedule,
        comm: &'a Comm,
        device: &Device,
        sink: Arc<dyn DeferringSink>,
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
            deferred_wgrad: None,
            loss_scale: LossFactor::Number(1.0),
            p2p: P2pConfig::default(),
            shapes: ShapeCache::default(),
        })
    }

    /// Defers the gradient of one weight of the last stage, usually the weight of the output layer. The rank of this
    /// stage computes the gradient after all other actions, while earlier ranks still run their last backwards. The
    /// inputs and output gradients of the layer are kept in memory until then. The results are bitwise equal to the
    /// results without deferral.
    pub fn with_deferred_wgrad(mut self, deferred_wgrad: Option<DeferredWgrad>) -> Self {
        self.deferred_wgrad = deferred_wgrad;
        self
    }

    /// Sets the options with which tensors are sent and received. The options must be the same on all ranks.
    pub fn with_p2p(mut self, p2p: P2pConfig) -> Self {
        self.p2p = p2p;
        self
    }

    /// Uses a cache of activation shapes that is shared with other engines.
    pub fn with_shape_cache(mut self, shapes: &ShapeCache) -> Self {
        self.shapes = shapes.clone();
        self
    }

    /// Sets the loss scale: the backward starts from the losses multiplied by `loss_scale`, which is a number or a
    /// tensor. The losses in [`EngineRun::losses`] are not scaled.
    pub fn with_loss_scale(mut self, loss_scale: impl Into<LossFactor>) -> Self {
        self.loss_scale = loss_scale.into();
        self
    }

    /// Runs all actions of this rank. If the pipeline has one rank, panics and [raised](crate::comm::raise) errors
    /// propagate to the caller instead of being returned as errors.
    ///
    /// # Errors
    ///
    /// - [`EngineError::Begin`] if the micro-batches of the ranks have different [shape
    ///   keys](Stage::shape_key).
    /// - [`EngineError::Action`] with the failed action. Communication failed, a stage [raised](crate::comm::raise) an
    ///   error, or a tensor had an unexpected shape. In the last case the cause is [`CommError::Mismatch`], and the
    ///   tensor was not sent.
    /// - [`EngineError::Panic`] with the action that panicked.
    /// - [`EngineError::Send`] if a send did not complete.
    pub fn run(&self, model: &impl Stage) -> Result<EngineRun, EngineError> {
        let keys =
            (0..self.schedule.micro_batches()).map(|micro_batch| model.shape_key(micro_batch));
        let mut state = EngineState::new(self, self.p2p_communicator(keys.collect()));
        state.begin().map_err(|source| EngineError::Begin {
            rank: self.comm.rank(),
            source: Box::new(source),
        })?;
        let mut events = vec![];
        let last = self.schedule.stages() - 1;
        let deferring_stage = self
            .deferred_wgrad
            .map(|_| last)
            .filter(|_| self.schedule.rank_of(last) == self.comm.rank());
        let mut next = 0;
        while let [first, rest @ ..] = self.schedule.together(self.comm.rank(), next) {
            next += 1 + rest.len();
            for action in [first].into_iter().chain(rest) {
                // The wait happens here and not at the position of the receive in the list, so that the sends
                // in between are not delayed.
                if let Some(receive) = self.schedule.receive_before(action) {
                    self.with_context(&receive, || state.wait(&receive))?;
                }
            }
            let (start, mut runs) = (Instant::now(), vec![]);
            self.with_context(first, || match rest {
                [] => state.perform(first, model),
                [backward, ..] => {
                    runs = state.perform_pair(first, backward, model);
                    Ok(())
                }
            })?;
            let end = Instant::now();
            match rest {
                [] => events.push(ActionEvent {
                    action: *first,
                    start,
                    end,
                }),
                [backward, ..] => events.extend(events_of_pair(first, backward, &runs)),
            }
        }
        if let Some(stage) = deferring_stage {
            let micro_batch = self.schedule.micro_batches() - 1;
            let action = Action::new(ActionKind::WeightGradient, stage, micro_batch);
            self.with_context(&action, || {
                state.compute_deferred_wgrads();
                Ok(())
            })?;
        }
        state.finish().map_err(|source| EngineError::Send {
            rank: self.comm.rank(),
            source: Box::new(source),
        })?;
        Ok(EngineRun {
            peak_activations: state.peak_activations(),
            losses: state.into_losses(),
            events,
        })
    }

    /// Returns the communicator for the sends and receives of this rank.
    fn p2p_communicator(&self, keys: Vec<ShapeKey>) -> P2pCommunicator<'a> {
        let actions = self.schedule.actions(self.comm.rank()).iter();
        let transfers = actions.filter(|action| action.kind.is_transfer());
        let transfers = transfers.filter_map(|action| Some((self.schedule.peer(action)?, *action)));
        let settings = (self.p2p, self.shapes.clone());
        P2pCommunicator::new(self.comm, &self.device, settings, transfers, keys)
    }

    /// Runs a part of an action. Errors name the action.
    fn with_context(
        &self,
        action: &Action,
        work: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<(), EngineError> {
        let rank = self.comm.rank();
        let _span = match action.kind {
            ActionKind::Forward => tracing::debug_span!("forward", %action),
            ActionKind::PairedForward => tracing::debug_span!("pair", %action),
            ActionKind::Backward | ActionKind::InputGradient => {
                tracing::debug_span!("backward", %action)
            }
            _ => tracing::debug_span!("action", %action),
        }
        .entered();
        let result = if self.comm.size() == 1 {
            // With a single pipeline rank, a panic unwinds unchanged.
            work()
        } else {
            // The state is dropped after a panic, so no inconsistent state is observed.
            catch_unwind(AssertUnwindSafe(work))
                .map_err(|payload| EngineError::from_panic(rank, *action, payload))?
        };
        result.map_err(|source| EngineError::Action {
            rank,
            action: *action,
            source: Box::new(source),
        })
    }
}
