//! A reduce-scatter of 16-bit tensors that computes the sums in `f32`.

use burn::tensor::{DType, Tensor};

use super::async_ops::{PendingTensor, part_len, pending_sum};
use super::dispatch::{InFlightTensorCall, launch};
use super::group::Comm;
use super::host::{from_buffer, invalid};
use crate::comm::{Buffer, Call, CommError, sum_parts_in_f32};

/// Starts a reduce-scatter of `x` (`bf16` or `f16`) that computes the sum in `f32`. Each rank keeps its part of the sum
/// as `f32`. The shape changes from `[n]` to `[n / ranks]`.
///
/// An all-to-all exchanges the 16-bit parts, so the number of sent bytes is the same as in a 16-bit reduce-scatter.
/// Each rank sums the parts that it receives. The result is bitwise equal to a reduce-scatter of the tensors cast to
/// `f32`, because partial sums are not rounded to 16 bits.
///
/// If `x` has another dtype, or its length is not a multiple of the number of ranks, the function sends nothing and
/// panics (see [`raise`](crate::comm::raise)).
pub fn start_reduce_scatter_in_f32(x: Tensor<1>, comm: &Comm) -> PendingTensor<1> {
    let (len, ranks) = (x.dims()[0], comm.size());
    if !matches!(x.dtype(), DType::BF16 | DType::F16) {
        invalid(format!(
            "a reduce-scatter that sums in f32 takes bf16 or f16, but the tensor [{len}] for {} is of {:?}; use the \
             plain reduce-scatter",
            comm.group(),
            x.dtype(),
        ));
    }
    let part = part_len(&x, 0, comm);
    if ranks == 1 {
        return PendingTensor::ready(x.cast(DType::F32));
    }
    let call = Call::AllToAll {
        send: vec![part; ranks],
        receive: vec![part; ranks],
    };
    pending_sum(launch(x, call, comm), [part], comm)
}

/// Waits for the parts of all ranks. Returns their sum in `f32`, of `shape`.
pub(super) fn sum_received<const D: usize>(
    call: InFlightTensorCall,
    shape: [usize; D],
    comm: &Comm,
) -> Result<Tensor<D>, CommError> {
    let (ranks, part) = (comm.size(), shape.iter().product());
    let InFlightTensorCall::Host {
        pending, device, ..
    } = call
    else {
        let received = call.try_wait([ranks * part])?;
        return Ok(sum_of_parts(received, ranks).reshape(shape));
    };
    let received = pending.wait()?;
    let mut sums = vec![0f32; part];
    sum_parts_in_f32(&received, ranks, &mut sums);
    if let Some(pool) = comm.pool() {
        pool.give(received);
    }
    Ok(from_buffer(Buffer::from(sums), shape, &device, DType::F32))
}

/// Returns the sum of `parts` equal parts of `whole`, in `f32`. The order is the order of `comm`: first
/// neighbors are added, then these pairs, and so on. A part without a partner is passed to the next level.
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
