//! The fingerprints of one run of a step on one rank, in order.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::function::{CallObserver, observed};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{CURRENT, flip_dispatch, of_tensor, of_tensors};
use crate::comm::testing::fault_injection::{FaultPlan, FlipTarget};
use crate::comm::{Call, Group};

/// What was computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Site {
    /// An operation of a layer, in the forward or the backward.
    Operation {
        function: String,
        /// The path of the layer that last read a parameter.
        layer: String,
        micro_batch: Option<usize>,
        is_backward: bool,
    },
    /// The gradient of a parameter on this rank, before it is reduced.
    Gradient { parameter: String },
    /// The losses of this rank.
    Losses,
    /// A collective, or a message.
    Call(CallKey),
}

/// A call, the same on all ranks that take part in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct CallKey {
    /// The operation and the group; for a message the two ranks.
    pub call: String,
    /// The number among those of one group or pair, from 0 in each run.
    pub sequence: u64,
}

/// Something that was computed, with the fingerprints of what it read and returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub site: Site,
    pub input: u64,
    pub output: u64,
}

/// Records one run of a step, and flips the bits of a fault plan.
pub(crate) struct Recorder {
    /// Whether fingerprints are taken.
    records: bool,
    rank: usize,
    faults: Option<Arc<FaultPlan>>,
    state: Mutex<RecorderState>,
}

#[derive(Default)]
struct RecorderState {
    layer: String,
    micro_batch: Option<usize>,
    /// The layer and the micro-batch of each forward.
    forwards: Vec<(String, Option<usize>)>,
    calls: HashMap<String, u64>,
    events: Vec<Event>,
}

impl Recorder {
    /// A recorder of a rank, which takes fingerprints or only injects faults.
    pub fn new(rank: usize, records: bool, faults: Option<Arc<FaultPlan>>) -> Arc<Self> {
        Arc::new(Self {
            records,
            rank,
            faults,
            state: Mutex::default(),
        })
    }

    /// Runs `body`, and sees what it computes on this thread.
    pub fn watch<T>(self: &Arc<Self>, body: impl FnOnce() -> T) -> T {
        /// Restores the outer recorder, also where the body unwinds.
        struct Restore(Option<Arc<Recorder>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.replace(self.0.take());
            }
        }
        let own = self.records.then(|| self.clone());
        let _restore = Restore(CURRENT.replace(own));
        observed(self.clone(), body)
    }

    /// What was recorded.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.state.lock().events)
    }

    pub(super) fn begin_layer(&self, parameter: &str) {
        let layer = parameter.rsplit_once('.').map_or("", |(layer, _)| layer);
        let mut state = self.state.lock();
        if state.layer != layer {
            state.layer = layer.into();
        }
    }

    pub(super) fn begin_micro_batch(&self, micro_batch: usize) {
        let mut state = self.state.lock();
        state.micro_batch = Some(micro_batch);
        state.layer.clear();
    }

    /// The gradient of a parameter on this rank, before it is reduced.
    pub fn gradient(&self, parameter: &str, gradient: Tensor<1>) {
        let site = Site::Gradient {
            parameter: parameter.into(),
        };
        self.add(site, 0, of_tensor(gradient));
    }

    /// The losses of this rank.
    pub fn losses(&self, losses: &[Tensor<1>]) {
        let all: Vec<_> = losses.iter().map(|x| x.clone().into_dispatch()).collect();
        let output = of_tensors(&all.iter().collect::<Vec<_>>());
        self.add(Site::Losses, 0, output);
    }

    /// Begins a call with an input of this fingerprint. A message that is sent is recorded at once.
    pub fn begin_call(
        self: &Arc<Self>,
        call: &Call,
        group: &Group,
        input: impl FnOnce() -> u64,
    ) -> Option<ObservedCall> {
        let ranks = group.ranks();
        let message = |from: usize, to: usize| {
            let (name, from, to) = (group.name(), ranks[from], ranks[to]);
            format!("message over {name} from rank {from} to rank {to}")
        };
        let name = match call {
            Call::Send { to } => message(group.index(), *to),
            Call::Receive { from, .. } => message(*from, group.index()),
            call => format!("{} over {group}", call.name()),
        };
        let key = {
            let mut state = self.state.lock();
            let next = state.calls.entry(name.clone()).or_default();
            let sequence = *next;
            *next += 1;
            CallKey {
                call: name,
                sequence,
            }
        };
        let input = match call {
            Call::Receive { .. } => 0,
            _ => input(),
        };
        if let Call::Send { .. } = call {
            self.add(Site::Call(key), input, 0);
            return None;
        }
        Some(ObservedCall {
            recorder: self.clone(),
            key,
            input,
        })
    }

    fn add(&self, site: Site, input: u64, output: u64) {
        let event = Event {
            site,
            input,
            output,
        };
        self.state.lock().events.push(event);
    }

    /// Flips the bit that the plan has for the next tensor.
    fn flip(&self, target: FlipTarget, function: &str, tensor: &mut DispatchTensor) {
        let plan = self.faults.as_ref();
        let Some(flip) = plan.and_then(|plan| plan.next_tensor(self.rank, target)) else {
            return;
        };
        let layer = self.state.lock().layer.clone();
        tracing::warn!(
            "{flip} triggers on rank {}: {function} in or after {layer}",
            self.rank
        );
        flip_dispatch(tensor, flip);
    }
}

impl CallObserver for Recorder {
    fn inputs(&self, forward: Option<u64>, tensors: &[&DispatchTensor]) -> u64 {
        if !self.records {
            return 0;
        }
        if let Some(forward) = forward {
            // What runs inside of the backward, such as a block that is computed again, belongs to the same.
            let state = &mut *self.state.lock();
            (state.layer, state.micro_batch) = state.forwards[forward as usize].clone();
        }
        of_tensors(tensors)
    }

    fn outputs(&self, function: &str, input: u64, outputs: &mut [DispatchTensor]) -> u64 {
        for output in &mut *outputs {
            self.flip(FlipTarget::Activation, function, output);
        }
        if !self.records {
            return 0;
        }
        let output = of_tensors(&outputs.iter().collect::<Vec<_>>());
        let mut state = self.state.lock();
        let (layer, micro_batch) = (state.layer.clone(), state.micro_batch);
        state.forwards.push((layer.clone(), micro_batch));
        state.events.push(Event {
            site: Site::Operation {
                function: function.into(),
                layer,
                micro_batch,
                is_backward: false,
            },
            input,
            output,
        });
        state.forwards.len() as u64 - 1
    }

    fn gradients(
        &self,
        function: &str,
        forward: u64,
        input: u64,
        gradients: &mut [Option<DispatchTensor>],
    ) {
        for gradient in gradients.iter_mut().flatten() {
            self.flip(FlipTarget::Gradient, function, gradient);
        }
        if !self.records {
            return;
        }
        let output = of_tensors(&gradients.iter().flatten().collect::<Vec<_>>());
        let (layer, micro_batch) = self.state.lock().forwards[forward as usize].clone();
        let site = Site::Operation {
            function: function.into(),
            layer,
            micro_batch,
            is_backward: true,
        };
        self.add(site, input, output);
    }
}

/// A call in flight.
pub(crate) struct ObservedCall {
    recorder: Arc<Recorder>,
    key: CallKey,
    input: u64,
}

impl ObservedCall {
    /// The call has returned a result of this fingerprint.
    pub fn end(self, output: u64) {
        self.recorder.add(Site::Call(self.key), self.input, output);
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation {
                function,
                layer,
                micro_batch,
                is_backward,
            } => {
                let pass = if *is_backward { "backward" } else { "forward" };
                write!(f, "the {pass} of {function}")?;
                match &layer[..] {
                    "" => {}
                    layer => write!(f, " in or after layer {layer}")?,
                }
                match micro_batch {
                    Some(micro_batch) => write!(f, ", micro-batch {micro_batch}"),
                    None => Ok(()),
                }
            }
            Self::Gradient { parameter } => write!(f, "the gradient of {parameter}"),
            Self::Losses => f.write_str("the losses"),
            Self::Call(CallKey { call, sequence }) => write!(f, "call {sequence} {call}"),
        }
    }
}
