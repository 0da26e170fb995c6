//! The one place that decides whether a tensor passes through host memory.

use burn::tensor::{DType, Device, Tensor};

use super::Comm;
use super::host::{from_buffer, or_raise, to_buffer};
use crate::comm::{Call, DevicePending, OnDevice, Pending};

/// A call under way on one tensor.
pub(super) enum Flight {
    /// Through host memory.
    Host {
        pending: Pending,
        device: Device,
        dtype: DType,
    },
    /// On the device of the tensor.
    Device(DevicePending),
}

/// Starts `call` on the elements of `x` in row-major order.
pub(super) fn launch<const D: usize>(x: Tensor<D>, call: Call, comm: &Comm) -> Flight {
    let (device, dtype) = (x.device(), x.dtype());
    match taker(comm, &device) {
        None => Flight::Host {
            pending: or_raise(comm.start(call, to_buffer(x))),
            device,
            dtype,
        },
        Some(engine) => {
            let len = x.shape().num_elements();
            let mut started = or_raise(engine.start(vec![(call, x.reshape([len]))]));
            Flight::Device(started.remove(0))
        }
    }
}

/// Starts `call` on each of `xs`, which lie on one device, as one call.
pub(super) fn launch_all(xs: Vec<Tensor<1>>, call: &Call, comm: &Comm) -> Vec<Flight> {
    let Some(first) = xs.first() else {
        return vec![];
    };
    if let Some(engine) = taker(comm, &first.device()) {
        let calls = xs.into_iter().map(|x| (call.clone(), x)).collect();
        let started = or_raise(engine.start(calls)).into_iter();
        return started.map(Flight::Device).collect();
    }
    let places: Vec<_> = xs.iter().map(|x| (x.device(), x.dtype())).collect();
    let calls = xs.into_iter().map(|x| (call.clone(), to_buffer(x)));
    let started = or_raise(comm.start_all(calls.collect())).into_iter();
    let flight = |(pending, (device, dtype))| Flight::Host {
        pending,
        device,
        dtype,
    };
    started.zip(places).map(flight).collect()
}

/// The engine's way for tensors that stay on `device`, if it has one.
pub(super) fn taker<'a>(comm: &'a Comm, device: &Device) -> Option<&'a dyn OnDevice> {
    comm.on_device().filter(|engine| engine.takes(device))
}

impl Flight {
    /// The result as a tensor of `shape`, in row-major order; waits for the other ranks.
    pub fn wait<const D: usize>(self, shape: [usize; D]) -> Tensor<D> {
        match self {
            Flight::Host {
                pending,
                device,
                dtype,
            } => from_buffer(or_raise(pending.wait()), shape, &device, dtype),
            Flight::Device(pending) => or_raise(pending.wait()).reshape(shape),
        }
    }
}
