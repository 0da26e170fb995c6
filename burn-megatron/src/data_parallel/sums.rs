//! Sums of many tensors over the ranks of a communicator, under way.

use burn::tensor::Tensor;

use crate::collective::{Comm, PendingTensor, start_all_reduce};
use crate::comm::ReduceOp;

/// A tensor of at least so many elements has a collective of its own; smaller ones share one.
const ALONE: usize = 1 << 16;

/// Collectives that were started together.
pub(super) struct Sums {
    buckets: Vec<Bucket>,
    /// At which one this rank begins to wait: each rank at another, so that the ranks share the
    /// work where it is the waiting rank that reduces.
    first: usize,
}

struct Bucket {
    /// Which tensors these are, and their lengths.
    members: Vec<(usize, usize)>,
    pending: PendingTensor<1>,
}

impl Sums {
    /// Starts summing tensors, each with a number of its own.
    pub fn start(tensors: Vec<(usize, Tensor<1>)>, comm: &Comm) -> Self {
        let alone = |(_, tensor): &(usize, Tensor<1>)| tensor.dims()[0] >= ALONE;
        let (large, small): (Vec<_>, Vec<_>) = tensors.into_iter().partition(alone);
        let mut groups: Vec<_> = large.into_iter().map(|tensor| vec![tensor]).collect();
        groups.extend((!small.is_empty()).then_some(small));
        let start = |group: Vec<(usize, Tensor<1>)>| {
            let members = group
                .iter()
                .map(|(number, tensor)| (*number, tensor.dims()[0]));
            let members = members.collect();
            let parts = group.into_iter().map(|(_, tensor)| tensor).collect();
            let pending = start_all_reduce(join(parts), ReduceOp::Sum, comm);
            Bucket { members, pending }
        };
        let buckets: Vec<_> = groups.into_iter().map(start).collect();
        let first = comm.rank() * buckets.len() / comm.size();
        Self { buckets, first }
    }

    /// Waits for all of them, and gives each sum to `put`.
    pub fn finish(mut self, mut put: impl FnMut(usize, Tensor<1>)) {
        self.buckets.rotate_left(self.first);
        for Bucket { members, pending } in self.buckets {
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

/// One tensor is taken as it is, without a copy.
fn join(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}
