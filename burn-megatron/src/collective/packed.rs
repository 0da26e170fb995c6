//! Collectives on `u32` tensors that contain packed data, such as FP8 codes.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_megatron_kernels::{bits, record};

use super::async_ops::{CollectiveOp, PendingTensor, start};
use super::coalesced::start_all_gather_coalesced;
use super::dispatch::device_engine;
use super::group::Comm;
use super::host::{invalid, or_raise};
use crate::comm::{Buffer, Call, CommError, Pending};
use crate::fingerprint::{self, ObservedCall};

/// The handle of an asynchronous collective. The result of the collective is a packed `u32` tensor.
#[must_use = "a collective that is not waited for has no result"]
pub struct PendingPacked(pub(super) PackedState);

pub(super) enum PackedState {
    Ready(Tensor<1, Int>),
    Host {
        pending: Pending,
        device: Device,
        observed: Option<ObservedCall>,
    },
    Device(Box<PendingTensor<1>>),
}

/// Starts an all-gather of each tensor in `xs`. The tensors contain `u32`, and their shape changes from `[n]` to
/// `[ranks * n]`.
///
/// The gathered bits are identical to the sent bits, and 4 bytes are sent per element. A single call starts all
/// collectives ([`start_all`](crate::comm::Communicator::start_all)), in device memory if the engine supports the
/// device. The handles are returned in the order of `xs`. If a tensor has another integer dtype, the function sends
/// nothing and panics (see [`raise`](crate::comm::raise)).
pub fn start_all_gather_packed_coalesced(
    xs: Vec<Tensor<1, Int>>,
    comm: &Comm,
) -> Vec<PendingPacked> {
    for x in &xs {
        check(x, comm);
    }
    let Some(device) = xs.first().map(Tensor::device) else {
        return vec![];
    };
    if comm.size() == 1 {
        return xs.into_iter().map(PendingPacked::ready).collect();
    }
    if device_engine(comm, &device).is_some() {
        // Engines support 32-bit floats, and a gather does not depend on the type.
        let floats = xs.into_iter().map(bits::as_f32).collect();
        let started = start_all_gather_coalesced(floats, comm).into_iter();
        let pending_call = |pending| PendingPacked(PackedState::Device(Box::new(pending)));
        return started.map(pending_call).collect();
    }
    let calls = xs.into_iter().map(|x| (Call::AllGather, to_buffer(x)));
    let calls: Vec<_> = calls.collect();
    let observed: Vec<_> = calls
        .iter()
        .map(|(call, x)| observe(x, call, comm))
        .collect();
    let started = or_raise(comm.start_all(calls)).into_iter();
    let pending_call = |(pending, observed)| {
        let device = device.clone();
        PendingPacked(PackedState::Host {
            pending,
            device,
            observed,
        })
    };
    started.zip(observed).map(pending_call).collect()
}

/// Starts an all-to-all of rows of `width` `u32` elements. `x` has the shape `[rows * width]`. `send[r]` of its rows
/// are sent to rank `r`, and `receive[r]` rows are received from rank `r`.
///
/// In all other respects, this function works like [`start_all_gather_packed_coalesced`].
pub(crate) fn start_all_to_all_packed(
    x: Tensor<1, Int>,
    width: usize,
    [send, receive]: [&[usize]; 2],
    comm: &Comm,
) -> PendingPacked {
    check(&x, comm);
    if comm.size() == 1 {
        return PendingPacked::ready(x);
    }
    let words = |rows: &[usize]| rows.iter().map(|rows| rows * width).collect::<Vec<_>>();
    let (send, receive, device) = (words(send), words(receive), x.device());
    if record::is_recording() || device_engine(comm, &device).is_some() {
        let op = CollectiveOp::AllToAll { send, receive };
        let pending = start(bits::as_f32(x), &op, comm);
        return PendingPacked(PackedState::Device(Box::new(pending)));
    }
    let (call, x) = (Call::AllToAll { send, receive }, to_buffer(x));
    let observed = observe(&x, &call, comm);
    let pending = or_raise(comm.start(call, x));
    PendingPacked(PackedState::Host {
        pending,
        device,
        observed,
    })
}

/// Takes the fingerprint of the input of a call, if fingerprints are recorded.
pub(super) fn observe(x: &Buffer, call: &Call, comm: &Comm) -> Option<ObservedCall> {
    let recorder = fingerprint::recording()?;
    recorder.begin_call(call, comm.group(), || fingerprint::of_buffer(x))
}

impl PendingPacked {
    /// Creates a handle that already has its result.
    pub fn ready(words: Tensor<1, Int>) -> Self {
        Self(PackedState::Ready(words))
    }

    /// Waits until the collective has finished. Returns the received elements in the order of the sending ranks.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the collective fails.
    pub fn wait(self) -> Tensor<1, Int> {
        or_raise(self.try_wait())
    }

    /// Waits like [`wait`](Self::wait), but returns an error instead of panicking.
    pub(crate) fn try_wait(self) -> Result<Tensor<1, Int>, CommError> {
        Ok(match self.0 {
            PackedState::Ready(words) => words,
            PackedState::Host {
                pending,
                device,
                observed,
            } => {
                let words = pending.wait()?;
                if let Some(observed) = observed {
                    observed.end(fingerprint::of_buffer(&words));
                }
                from_buffer(words, &device)
            }
            PackedState::Device(pending) => bits::as_u32(pending.try_wait()?),
        })
    }
}

fn check(x: &Tensor<1, Int>, comm: &Comm) {
    if x.dtype() != DType::U32 {
        invalid(format!(
            "packed words are of u32, but the tensor {:?} for {} is of {:?}",
            x.dims(),
            comm.group(),
            x.dtype(),
        ));
    }
}

/// Returns the elements as `i32` with the same bits.
pub(super) fn to_buffer(x: Tensor<1, Int>) -> Buffer {
    let words = x.try_into_data().map(TensorData::try_into_vec::<u32>);
    match words {
        Ok(Ok(words)) => {
            let words: Vec<i32> = words.into_iter().map(u32::cast_signed).collect();
            words.into()
        }
        Ok(Err(error)) => invalid(format!("packed words cannot be read: {error}")),
        Err(error) => invalid(format!(
            "packed words cannot be read from their device: {error}"
        )),
    }
}

/// Returns u32 elements with the bits of a buffer of i32.
fn from_buffer(buffer: Buffer, device: &Device) -> Tensor<1, Int> {
    let words = buffer.into_vec::<i32>().into_iter();
    let words: Vec<u32> = words.map(i32::cast_unsigned).collect();
    let len = words.len();
    Tensor::from_data(TensorData::new(words, [len]), (device, DType::U32))
}
