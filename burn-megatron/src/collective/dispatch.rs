//! Dispatches collective calls on tensors. A call runs on the device of the tensor or through host memory.

use burn::tensor::{DType, Device, Tensor};

use burn_megatron_kernels::record;

use super::group::Comm;
use super::host::{from_buffer, or_raise, to_buffer};
use super::recorded::RecordedExchange;
use crate::comm::{Call, CommError, DeviceCommunicator, DevicePending, Pending};
use crate::fingerprint::{self, ObservedCall};

/// A started call on one tensor.
pub(super) enum InFlightTensorCall {
    /// The call runs through host memory.
    Host {
        pending: Pending,
        device: Device,
        dtype: DType,
    },
    /// The call runs on the device of the tensor.
    Device(DevicePending),
    /// Operations are being recorded, and nothing is sent.
    Recorded(RecordedExchange),
    /// The call runs, and a fingerprint of its result is recorded.
    Observed(Box<InFlightTensorCall>, ObservedCall),
}

/// Starts `call` on the elements of `x` in row-major order.
pub(super) fn launch<const D: usize>(x: Tensor<D>, call: Call, comm: &Comm) -> InFlightTensorCall {
    or_raise(try_launch(x, call, comm))
}

/// Starts a call like [`launch`], but returns an error instead of panicking.
pub(super) fn try_launch<const D: usize>(
    x: Tensor<D>,
    call: Call,
    comm: &Comm,
) -> Result<InFlightTensorCall, CommError> {
    let (device, dtype) = (x.device(), x.dtype());
    if record::is_recording() {
        return Ok(InFlightTensorCall::Recorded(RecordedExchange::new(
            x, &call, comm,
        )));
    }
    let observed = observe(&x, &call, comm);
    let launched = match device_engine(comm, &device) {
        None => InFlightTensorCall::Host {
            pending: comm.start(call, to_buffer(x))?,
            device,
            dtype,
        },
        Some(engine) => {
            let len = x.shape().num_elements();
            let mut started = engine.start(vec![(call, x.reshape([len]))])?;
            InFlightTensorCall::Device(started.remove(0))
        }
    };
    Ok(launched.observed(observed))
}

/// Takes the fingerprint of the input of a call, if fingerprints are recorded.
fn observe<const D: usize>(x: &Tensor<D>, call: &Call, comm: &Comm) -> Option<ObservedCall> {
    let recorder = fingerprint::recording()?;
    recorder.begin_call(call, comm.group(), || fingerprint::of_tensor(x.clone()))
}

/// Starts the collective `call` on each tensor in `xs` with a single call. All tensors must be on the same device.
pub(super) fn launch_all(xs: Vec<Tensor<1>>, call: &Call, comm: &Comm) -> Vec<InFlightTensorCall> {
    let Some(first) = xs.first() else {
        return vec![];
    };
    let observed: Vec<_> = xs.iter().map(|x| observe(x, call, comm)).collect();
    if let Some(engine) = device_engine(comm, &first.device()) {
        let calls = xs.into_iter().map(|x| (call.clone(), x)).collect();
        let started = or_raise(engine.start(calls)).into_iter();
        let started = started.map(InFlightTensorCall::Device).zip(observed);
        return started.map(|(call, seen)| call.observed(seen)).collect();
    }
    let places: Vec<_> = xs.iter().map(|x| (x.device(), x.dtype())).collect();
    let calls = xs.into_iter().map(|x| (call.clone(), to_buffer(x)));
    let started = or_raise(comm.start_all(calls.collect())).into_iter();
    let call = |(pending, (device, dtype))| InFlightTensorCall::Host {
        pending,
        device,
        dtype,
    };
    let started = started.zip(places).map(call).zip(observed);
    started.map(|(call, seen)| call.observed(seen)).collect()
}

/// Returns the interface of the communication engine for tensors on `device`, or `None` if the engine does not support
/// the device.
pub(super) fn device_engine<'a>(
    comm: &'a Comm,
    device: &Device,
) -> Option<&'a dyn DeviceCommunicator> {
    comm.on_device().filter(|engine| engine.takes(device))
}

impl InFlightTensorCall {
    fn observed(self, observed: Option<ObservedCall>) -> Self {
        match observed {
            Some(observed) => Self::Observed(Box::new(self), observed),
            None => self,
        }
    }

    /// Waits until the call has finished, and returns the result as a tensor of `shape`, in row-major order.
    pub fn try_wait<const D: usize>(self, shape: [usize; D]) -> Result<Tensor<D>, CommError> {
        Ok(match self {
            InFlightTensorCall::Host {
                pending,
                device,
                dtype,
            } => from_buffer(pending.wait()?, shape, &device, dtype),
            InFlightTensorCall::Device(pending) => pending.wait()?.reshape(shape),
            InFlightTensorCall::Recorded(exchange) => exchange.result(shape),
            InFlightTensorCall::Observed(call, observed) => {
                let result = call.try_wait(shape)?;
                observed.end(fingerprint::of_tensor(result.clone()));
                result
            }
        })
    }
}
