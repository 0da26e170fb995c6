//! An all-reduce of many tensors that coalesces small tensors.

use burn::tensor::Tensor;

use crate::collective::{Comm, PendingTensor, start_all_reduce};
use crate::comm::ReduceOp;

/// Tensors with fewer elements share one collective. Each larger tensor has its own collective.
const COALESCE_BELOW: usize = 1 << 16;

/// All-reduces that were started together.
pub(super) struct CoalescedAllReduce {
    groups: Vec<CoalescedTensors>,
    /// The index of the collective for which this rank waits first. It differs between ranks: with some engines, the
    /// waiting rank computes the sum, and the ranks then share this work.
    first: usize,
}

struct CoalescedTensors {
    /// The number and length of each tensor.
    members: Vec<(usize, usize)>,
    pending: PendingTensor<1>,
}

impl CoalescedAllReduce {
    /// Starts all-reduces that sum each tensor over the ranks of `comm`. `tensors` contains each tensor with its
    /// number. Collective: call on all ranks of `comm`.
    pub fn start(tensors: Vec<(usize, Tensor<1>)>, comm: &Comm) -> Self {
        let is_large = |(_, tensor): &(usize, Tensor<1>)| tensor.dims()[0] >= COALESCE_BELOW;
        let (large, small): (Vec<_>, Vec<_>) = tensors.into_iter().partition(is_large);
        let mut tensor_groups: Vec<_> = large.into_iter().map(|tensor| vec![tensor]).collect();
        tensor_groups.extend((!small.is_empty()).then_some(small));
        let start = |group: Vec<(usize, Tensor<1>)>| {
            let members = group
                .iter()
                .map(|(number, tensor)| (*number, tensor.dims()[0]))
                .collect();
            let parts = group.into_iter().map(|(_, tensor)| tensor).collect();
            let pending = start_all_reduce(concatenate(parts), ReduceOp::Sum, comm);
            CoalescedTensors { members, pending }
        };
        let groups: Vec<_> = tensor_groups.into_iter().map(start).collect();
        let first = comm.rank() * groups.len() / comm.size();
        Self { groups, first }
    }

    /// Waits for all all-reduces. Then calls `put` with the number and the sum of each tensor.
    pub fn finish(mut self, mut put: impl FnMut(usize, Tensor<1>)) {
        self.groups.rotate_left(self.first);
        for CoalescedTensors { members, pending } in self.groups {
            let sum = pending.wait();
            if let [(number, _)] = members[..] {
                put(number, sum);
                continue;
            }
            let mut start = 0;
            for (number, len) in members {
                put(number, sum.clone().narrow(0, start, len));
                start += len;
            }
        }
    }
}

/// Concatenates tensors. A single tensor is returned without a copy.
fn concatenate(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}
