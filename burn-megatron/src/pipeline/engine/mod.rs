//! The engine that runs a schedule on one rank. The main entry point is [`Engine`].
//!
//! Each forward builds its own autodiff graph, from the received activation to the stage's output. The output
//! is sent and freed while the graph is kept. The backward starts from the received gradient of the output.
//! Weight gradients of linear layers can be deferred to a separate action.
//!
//! A forward and a backward that the schedule [pairs](ActionKind::PairedForward) alternate node by node. While
//! one of them waits for an exchange between ranks, the other computes. See [`Stage::forward_nodes`].

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

/// The stages of one rank.
pub trait Stage {
    /// Runs a stage on a micro-batch. `input` is the output of the previous stage, tracked by autodiff, or
    /// `None` for the first stage.
    fn forward(&self, stage: usize, micro_batch: usize, input: Option<Tensor<3>>) -> StageOutput;

    /// Runs [`forward`](Self::forward) on a rank whose schedule has pairs. A stage passes `nodes` to its layers
    /// that exchange rows between ranks, which end a node at the exchange. By default the forward is one node.
    /// Results are bit-equal.
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

    /// Returns the key of a micro-batch's shapes, such as `[batch, seq]` of its tokens. It must be the same on
    /// all ranks, and known before the forward. A stage must return activations of one shape for all
    /// micro-batches with the same key. By default all micro-batches have the same key.
    fn shape_key(&self, micro_batch: usize) -> ShapeKey {
        let _ = micro_batch;
        ShapeKey::default()
    }

    /// Called after the backward of a stage with the gradients of the leaves that the stage created.
    fn after_backward(&self, stage: usize, micro_batch: usize, leaves: &mut Gradients) {
        let _ = (stage, micro_batch, leaves);
    }
}

/// The result of a stage.
pub enum StageOutput {
    /// The input of the next stage: `[batch, seq, hidden]`.
    Activation(Tensor<3>),
    /// The loss of the micro-batch, summed over its tokens, from the last stage.
    Loss(Tensor<1>),
}

/// An action with its measured times, or a part of an action: a paired forward and backward alternate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ActionEvent {
    /// The action.
    pub action: Action,
    /// The start time.
    pub start: Instant,
    /// The end time.
    pub end: Instant,
}

/// The result of a run on one rank.
#[derive(Clone, Debug)]
pub struct EngineRun {
    /// The losses of the micro-batches, `[1]` each, without autodiff. Empty on ranks without the last stage.
    pub losses: Vec<Tensor<1>>,
    /// The actions, in order.
    pub events: Vec<ActionEvent>,
    /// The peak number of live stage-activations on this rank, counted like
    /// [`ActivationReport::peak_activations`](super::schedule::ActivationReport::peak_activations).
    pub peak_activations: usize,
}

impl EngineRun {
    /// Returns the sum of the losses, read from the device. It is 0 on ranks without the last stage.
    pub fn loss(&self) -> f64 {
        let losses = self.losses.iter();
        losses.map(|loss| loss.clone().into_scalar::<f64>()).sum()
    }
}

/// A schedule cannot be run, or its run failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum EngineError {
    /// The schedule breaks a rule.
    #[error(transparent)]
    Invalid(Box<InvalidSchedule>),
    /// The schedule and the pipeline axis have different numbers of ranks.
    #[error("the schedule is for {schedule} ranks, the pipeline has {pipeline}")]
    Ranks {
        /// The number of ranks of the schedule.
        schedule: usize,
        /// The number of ranks of the pipeline axis.
        pipeline: usize,
    },
    /// The neighboring ranks have different micro-batches, or cannot be reached.
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
    /// A stage panicked.
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

/// A weight whose gradient the last stage defers to the cool-down phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeferredWgrad {
    /// The index of the weight in the parameter table.
    pub index: usize,
    /// The maximum number of gradients that are deferred at once; 0 for no limit.
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
    /// Creates an engine for the ranks of `comm`. Gradients of parameters are passed to `sink`.
    ///
    /// # Errors
    ///
    /// [`EngineError::Invalid`] for an invalid schedule; [`EngineError::Ranks`] for a schedule with another
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

    /// Defers the gradient of one weight of the last stage, the weight of the output layer. Its rank computes
    /// it after all other actions, while earlier ranks still run their last backwards. Results are bit-equal.
    /// The inputs and output gradients of the layer are kept until then.
    pub fn with_deferred_wgrad(mut self, deferred_wgrad: Option<DeferredWgrad>) -> Self {
        self.deferred_wgrad = deferred_wgrad;
        self
    }

    /// Sets the options for sending and receiving tensors. They must be the same on all ranks.
    pub fn with_p2p(mut self, p2p: P2pConfig) -> Self {
        self.p2p = p2p;
        self
    }

    /// Uses the shapes that runs of other engines have recorded, in addition to the engine's own runs.
    pub fn with_shape_cache(mut self, shapes: &ShapeCache) -> Self {
        self.shapes = shapes.clone();
        self
    }

    /// Multiplies the losses by `loss_scale`, a number or a tensor, for the backward. [`EngineRun::losses`]
    /// stay unscaled.
    pub fn with_loss_scale(mut self, loss_scale: impl Into<LossFactor>) -> Self {
        self.loss_scale = loss_scale.into();
        self
    }

    /// Runs all actions of this rank. On a pipeline of one rank, panics and raised errors unwind.
    ///
    /// # Errors
    ///
    /// - [`EngineError::Begin`] if the micro-batches of the ranks have different [shape
    ///   keys](Stage::shape_key).
    /// - [`EngineError::Action`] with the action in which communication failed, a tensor had an unexpected
    ///   shape ([`CommError::Mismatch`], with nothing sent), or a stage [raised](crate::comm::raise) an error.
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
