//! Point-to-point messages between two ranks. Each message contains one tensor. It is sent from device memory if the
//! engine supports the device, otherwise through host memory.
//!
//! A message has no header, because the receiver specifies the dtype and the length. Messages between two ranks arrive
//! in the order in which they are sent.

use burn::tensor::{DType, Device, Int, Tensor};
use burn_megatron_kernels::bits;

use super::async_ops::{PendingTensor, pending_call};
use super::dispatch::{InFlightTensorCall, device_engine, try_launch};
use super::group::Comm;
use super::host::wire_dtype;
use super::packed::{self, PackedState, PendingPacked};
use crate::comm::{Buffer, Call, CommError, DType as WireDType};

/// A message that this rank sends.
#[must_use = "a send that is never waited for reports no error"]
pub(crate) struct PendingSend(InFlightTensorCall);

/// Whether a receive on `device` may be started before other calls for which its sender waits.
pub(crate) fn allows_early_receives(device: &Device, comm: &Comm) -> bool {
    device_engine(comm, device).is_none_or(|engine| engine.allows_early_receives())
}

/// Starts sending the elements of a plain tensor in row-major order.
///
/// # Errors
///
/// [`CommError`] if the call cannot be started.
pub(crate) fn start_send<const D: usize>(
    x: Tensor<D>,
    to: usize,
    comm: &Comm,
) -> Result<PendingSend, CommError> {
    try_launch(x, Call::Send { to }, comm).map(PendingSend)
}

/// Starts receiving a tensor of the float type `dtype` on `device`.
///
/// # Errors
///
/// [`CommError`] if the call cannot be started.
pub(crate) fn start_receive<const D: usize>(
    from: usize,
    shape: [usize; D],
    dtype: DType,
    device: &Device,
    comm: &Comm,
) -> Result<PendingTensor<D>, CommError> {
    let call = Call::Receive {
        from,
        dtype: wire_dtype(dtype),
        len: shape.iter().product(),
    };
    let empty = Tensor::<1>::empty([0], (device, dtype));
    Ok(pending_call(try_launch(empty, call, comm)?, 1, shape, 0))
}

/// Starts sending packed `u32` elements, `[n]`. Every bit is preserved.
///
/// # Errors
///
/// [`CommError`] if the call cannot be started.
pub(crate) fn start_send_packed(
    words: Tensor<1, Int>,
    to: usize,
    comm: &Comm,
) -> Result<PendingSend, CommError> {
    let device = words.device();
    if device_engine(comm, &device).is_some() {
        // Engines support 32-bit floats, and a message does not depend on the type.
        return start_send(bits::as_f32(words), to, comm);
    }
    let words = packed::to_buffer(words);
    packed::observe(&words, &Call::Send { to }, comm);
    let pending = comm.start_send(words, to)?;
    Ok(PendingSend(InFlightTensorCall::Host {
        pending,
        device,
        dtype: DType::U32,
    }))
}

/// Starts receiving `len` packed `u32` elements on `device`.
///
/// # Errors
///
/// [`CommError`] if the call cannot be started.
pub(crate) fn start_receive_packed(
    from: usize,
    len: usize,
    device: &Device,
    comm: &Comm,
) -> Result<PendingPacked, CommError> {
    let state = if device_engine(comm, device).is_some() {
        let pending = start_receive(from, [len], DType::F32, device, comm)?;
        PackedState::Device(Box::new(pending))
    } else {
        let dtype = WireDType::I32;
        let observed = packed::observe(
            &Buffer::empty(dtype),
            &Call::Receive { from, dtype, len },
            comm,
        );
        PackedState::Host {
            pending: comm.start_receive(from, dtype, len)?,
            device: device.clone(),
            observed,
        }
    };
    Ok(PendingPacked(state))
}

/// Starts sending numbers from host memory.
///
/// # Errors
///
/// [`CommError`] if the call cannot be started.
pub(crate) fn start_send_numbers(
    numbers: Vec<i64>,
    to: usize,
    comm: &Comm,
) -> Result<PendingSend, CommError> {
    let pending = comm.start_send(Buffer::from(numbers), to)?;
    Ok(PendingSend(InFlightTensorCall::Host {
        pending,
        device: Device::flex(),
        dtype: DType::I64,
    }))
}

impl PendingSend {
    /// Waits until the message is sent. On a device, waits until the message is enqueued.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the send failed.
    pub fn wait(self) -> Result<(), CommError> {
        match self.0 {
            InFlightTensorCall::Host { pending, .. } => pending.wait().map(drop),
            InFlightTensorCall::Device(pending) => pending.wait().map(drop),
            InFlightTensorCall::Recorded(_) => Ok(()),
            // A send has no result.
            InFlightTensorCall::Observed(call, _) => PendingSend(*call).wait(),
        }
    }
}
