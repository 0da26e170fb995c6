//! The reduce-scatter of 16-bit tensors that sums in f32.

use burn::tensor::{DType, Device, Tensor};

use super::Comm;
use super::async_ops::part_len;
use super::dispatch::{InFlightTensorCall, launch};
use super::host::{from_buffer, invalid, or_raise};
use crate::comm::{Buffer, Call, Pending, sum_parts_in_f32};

/// A [`start_reduce_scatter_in_f32`] in flight.
#[must_use = "a collective that is not waited for has no result"]
pub struct PendingReduceScatterInF32(ReduceInF32State);

enum ReduceInF32State {
    Ready(Box<Tensor<1>>),
    InFlight {
        call: InFlightTensorCall,
        comm: Comm,
        part: usize,
    },
}

/// Starts summing `x`, of `bf16` or `f16`, over the ranks, with every addition in `f32`; each rank keeps
/// its part, as `f32`: `[n] -> [n / ranks]`.
///
/// The 16-bit parts are exchanged by an all_to_all, so that as many bytes are sent as by a reduce-scatter in
/// 16 bits, and each rank sums what it receives. The result has the bits of a reduce-scatter of the widened
/// tensors: nothing is rounded to 16 bits in between.
///
/// Unwinds with [`raise`](crate::comm::raise), with nothing sent, if `x` has another type or its length
/// is not a multiple of the number of ranks.
pub fn start_reduce_scatter_in_f32(x: Tensor<1>, comm: &Comm) -> PendingReduceScatterInF32 {
    let (len, ranks) = (x.dims()[0], comm.size());
    if !matches!(x.dtype(), DType::BF16 | DType::F16) {
        invalid(format!(
            "a reduce-scatter that sums in f32 takes bf16 or f16, but the tensor [{len}] for {} is \
             of {:?}; the plain one fits it",
            comm.group(),
            x.dtype(),
        ));
    }
    let part = part_len(&x, 0, comm);
    if ranks == 1 {
        return PendingReduceScatterInF32(ReduceInF32State::Ready(Box::new(x.cast(DType::F32))));
    }
    let call = Call::AllToAll {
        send: vec![part; ranks],
        receive: vec![part; ranks],
    };
    PendingReduceScatterInF32(ReduceInF32State::InFlight {
        call: launch(x, call, comm),
        comm: comm.clone(),
        part,
    })
}

impl PendingReduceScatterInF32 {
    /// This rank's part of the sum, `[n / ranks]` of `f32`; waits for the other ranks.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) when the collective fails.
    pub fn wait(self) -> Tensor<1> {
        match self.0 {
            ReduceInF32State::Ready(tensor) => *tensor,
            ReduceInF32State::InFlight { call, comm, part } => match call {
                InFlightTensorCall::Host {
                    pending, device, ..
                } => sum_on_host(pending, &comm, part, &device),
                call => sum_of_parts(call.wait([comm.size() * part]), comm.size()),
            },
        }
    }
}

fn sum_on_host(pending: Pending, comm: &Comm, part: usize, device: &Device) -> Tensor<1> {
    let received = or_raise(pending.wait());
    let mut sums = vec![0f32; part];
    sum_parts_in_f32(&received, comm.size(), &mut sums);
    if let Some(pool) = comm.pool() {
        pool.give(received);
    }
    from_buffer(Buffer::from(sums), [part], device, DType::F32)
}

/// The sum of `parts` equal parts of `whole`, in `f32` and in the order of `comm`: neighbours first, then
/// these pairs, and so on; one without a partner is passed up.
fn sum_of_parts(whole: Tensor<1>, parts: usize) -> Tensor<1> {
    let mut sums = whole.cast(DType::F32).chunk(parts, 0);
    while sums.len() > 1 {
        let mut rest = sums.into_iter();
        let pair = || {
            let first = rest.next()?;
            Some(match rest.next() {
                Some(second) => first + second,
                None => first,
            })
        };
        sums = std::iter::from_fn(pair).collect();
    }
    sums.remove(0)
}
