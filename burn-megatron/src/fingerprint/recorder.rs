//! Records the fingerprints of one run of a step on one rank, in the order of the computations.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use burn_megatron_kernels::function::{CallObserver, observed};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{CURRENT, of_tensor, of_tensors};
use crate::comm::{Call, Group};

/// The computation that an event records.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Site {
    /// An operation of a layer, in the forward or the backward.
    Operation {
        /// The name of the operation.
        function: String,
        /// The path of the layer to which the operation belongs. It is the layer that last read a parameter.
        layer: String,
        /// The index of the micro-batch in the step.
        micro_batch: Option<usize>,
        /// Whether this is the backward of the operation.
        is_backward: bool,
    },
    /// The gradient of a parameter on this rank, before it is reduced.
    Gradient {
        /// The path of the parameter.
        parameter: String,
    },
    /// The losses that this rank computed.
    Losses,
    /// A collective or a message.
    Call(CallKey),
}

/// The key of a collective or a message. It is the same on all ranks that take part in the call.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CallKey {
    /// The operation, with the process group of a collective or the two ranks of a message.
    pub call: String,
    /// The sequence number among the calls of a process group or of a pair of ranks. It starts at 0 in each run.
    pub sequence: u64,
}

/// A recorded computation with the fingerprints of its inputs and outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The computation that was recorded.
    pub site: Site,
    /// The combined fingerprint of all inputs.
    pub input: u64,
    /// The fingerprint of each tensor that the computation returns. For a backward, there is one fingerprint per input
    /// of the forward. It is 0 for an input without a gradient.
    pub outputs: Vec<u64>,
}

/// A function that simulates a fault: it changes a tensor that an operation has returned, and returns a description of
/// the fault. The function returns `None` if it does not change the tensor. The first argument is true for gradients
/// and false for activations.
pub type Corruption = dyn Fn(bool, &mut DispatchTensor) -> Option<String> + Send + Sync;

/// A recorder of one run of a step, which can also inject faults into the step.
pub struct Recorder {
    /// Whether fingerprints are recorded.
    records: bool,
    corruption: Option<Box<Corruption>>,
    state: Mutex<RecorderState>,
}

/// The layer and the micro-batch of an operation.
#[derive(Clone, Default)]
struct Place {
    layer: String,
    micro_batch: Option<usize>,
}

#[derive(Default)]
struct RecorderState {
    place: Place,
    /// The place of each forward.
    forwards: Vec<Place>,
    /// The places at which the surrounding passes continue, one per running backward, innermost last. If two
    /// micro-batches overlap, the backward of one runs inside the forward of the other.
    around: Vec<Place>,
    calls: HashMap<String, u64>,
    events: Vec<Event>,
}

impl Recorder {
    /// Creates a recorder. If `records` is false, the recorder only injects faults and does not record fingerprints.
    pub fn new(records: bool, corruption: Option<Box<Corruption>>) -> Arc<Self> {
        Arc::new(Self {
            records,
            corruption,
            state: Mutex::default(),
        })
    }

    /// Runs `body` and records the computations that `body` runs on this thread.
    pub fn watch<T>(self: &Arc<Self>, body: impl FnOnce() -> T) -> T {
        /// Restores the outer recorder, even if the body unwinds.
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

    /// Removes the recorded events from the recorder and returns them.
    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.state.lock().events)
    }

    pub(super) fn begin_layer(&self, parameter: &str) {
        let layer = parameter.rsplit_once('.').map_or("", |(layer, _)| layer);
        let place = &mut self.state.lock().place;
        if place.layer != layer {
            place.layer = layer.into();
        }
    }

    pub(super) fn begin_micro_batch(&self, micro_batch: usize) {
        self.state.lock().place = Place {
            layer: String::new(),
            micro_batch: Some(micro_batch),
        };
    }

    /// Records the gradient of a parameter on this rank, before it is reduced.
    pub fn gradient(&self, parameter: &str, gradient: Tensor<1>) {
        let site = Site::Gradient {
            parameter: parameter.into(),
        };
        self.add(site, 0, vec![of_tensor(gradient)]);
    }

    /// Records the losses of this rank.
    pub fn losses(&self, losses: &[Tensor<1>]) {
        let outputs = losses.iter().map(|x| of_tensor(x.clone()));
        self.add(Site::Losses, 0, outputs.collect());
    }

    /// Begins the record of a collective or message whose input has this fingerprint. A message that is sent is
    /// recorded immediately.
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
            self.add(Site::Call(key), input, vec![]);
            return None;
        }
        Some(ObservedCall {
            recorder: self.clone(),
            key,
            input,
        })
    }

    fn add(&self, site: Site, input: u64, outputs: Vec<u64>) {
        let event = Event {
            site,
            input,
            outputs,
        };
        self.state.lock().events.push(event);
    }

    /// Injects a fault into a tensor, if the corruption changes it.
    fn corrupt(&self, is_gradient: bool, function: &str, tensor: &mut DispatchTensor) {
        let corruption = self.corruption.as_ref();
        let Some(fault) = corruption.and_then(|corruption| corruption(is_gradient, tensor)) else {
            return;
        };
        // The layer is only known if fingerprints are recorded.
        let layer = match &self.state.lock().place.layer[..] {
            "" => String::new(),
            layer => format!(" in or after layer {layer}"),
        };
        tracing::warn!("{fault}: {function}{layer}");
    }
}

impl CallObserver for Recorder {
    fn inputs(&self, forward: Option<u64>, tensors: &[&DispatchTensor]) -> u64 {
        if !self.records {
            return 0;
        }
        if let Some(forward) = forward {
            // Operations inside the backward, such as a recomputed block, belong to the same place.
            let state = &mut *self.state.lock();
            let own = state.forwards[forward as usize].clone();
            state.around.push(std::mem::replace(&mut state.place, own));
        }
        of_tensors(tensors)
    }

    fn outputs(&self, function: &str, input: u64, outputs: &mut [DispatchTensor]) -> u64 {
        for output in &mut *outputs {
            self.corrupt(false, function, output);
        }
        if !self.records {
            return 0;
        }
        let outputs = outputs.iter().map(|output| of_tensors(&[output])).collect();
        let place = self.state.lock().place.clone();
        self.add(place.clone().operation(function, false), input, outputs);
        let forwards = &mut self.state.lock().forwards;
        forwards.push(place);
        forwards.len() as u64 - 1
    }

    fn gradients(
        &self,
        function: &str,
        forward: u64,
        input: u64,
        gradients: &mut [Option<DispatchTensor>],
    ) {
        for gradient in gradients.iter_mut().flatten() {
            self.corrupt(true, function, gradient);
        }
        if !self.records {
            return;
        }
        let of_gradient = |gradient: &Option<DispatchTensor>| {
            gradient
                .as_ref()
                .map_or(0, |gradient| of_tensors(&[gradient]))
        };
        let outputs = gradients.iter().map(of_gradient).collect();
        let own = self.state.lock().forwards[forward as usize].clone();
        self.add(own.operation(function, true), input, outputs);
        let state = &mut *self.state.lock();
        state.place = state.around.pop().unwrap_or_default();
    }
}

impl Place {
    fn operation(self, function: &str, is_backward: bool) -> Site {
        Site::Operation {
            function: function.into(),
            layer: self.layer,
            micro_batch: self.micro_batch,
            is_backward,
        }
    }
}

/// A collective or message in flight that is being recorded.
pub struct ObservedCall {
    recorder: Arc<Recorder>,
    key: CallKey,
    input: u64,
}

impl ObservedCall {
    /// Ends the record of the call, whose result has this fingerprint.
    pub fn end(self, output: u64) {
        let (site, outputs) = (Site::Call(self.key), vec![output]);
        self.recorder.add(site, self.input, outputs);
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

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// If two micro-batches overlap, the backward of one runs between two operations of the forward of the
    /// other.
    #[test]
    fn operations_after_a_backward_inside_of_a_forward_are_of_the_forward() {
        let recorder = Recorder::new(true, None);
        let x = || Tensor::<1>::from_floats([1.0, 2.0], &Device::flex()).into_dispatch();
        let forward = |function: &str| {
            let input = recorder.inputs(None, &[&x()]);
            recorder.outputs(function, input, &mut [x()])
        };
        let backward = |function: &str, of: u64, inside: &dyn Fn()| {
            let input = recorder.inputs(Some(of), &[&x()]);
            inside();
            recorder.gradients(function, of, input, &mut [None, Some(x())]);
        };
        recorder.begin_micro_batch(0);
        recorder.begin_layer("blocks.0.mlp.up.weight");
        let first = forward("A");
        recorder.begin_micro_batch(1);
        recorder.begin_layer("blocks.0.attention.query.weight");
        forward("B");
        backward("A", first, &|| {
            // A recomputed block.
            recorder.begin_layer("blocks.0.norm.weight");
            forward("C");
        });
        forward("D");
        let found: Vec<_> = recorder
            .take()
            .iter()
            .map(|it| it.site.to_string())
            .collect();
        assert_eq!(
            found,
            [
                "the forward of A in or after layer blocks.0.mlp.up, micro-batch 0",
                "the forward of B in or after layer blocks.0.attention.query, micro-batch 1",
                "the forward of C in or after layer blocks.0.norm, micro-batch 0",
                "the backward of A in or after layer blocks.0.mlp.up, micro-batch 0",
                "the forward of D in or after layer blocks.0.attention.query, micro-batch 1",
            ]
        );
    }
}
