//! Attention between the queries of a rank and the keys and values of all ranks of a group. The tensors are not tracked
//! by autodiff.

use std::fmt::Debug;

use burn::tensor::Tensor;
use burn_megatron_kernels::attention::merge;

use super::partial::{PartialAttention, PartialGradients, PartialResult, unseen};
use super::shard::{Members, QueryPart};
use crate::collective::{
    Comm, PendingTensor, RingAllGather, start_all_gather, start_reduce_scatter, start_ring_shift,
};
use crate::nn::wide::wide;

/// An algorithm that exchanges keys and values between the ranks of a group.
///
/// All ranks of the group must call the same methods in the same order. Each rank holds its own block of keys and
/// values, `[tokens, 2 groups, width]`. See [`PartialAttention`].
pub trait KeyValueExchange: Debug + Send + Sync {
    /// Computes attention between this rank's queries `[1, tokens, heads, width]` and the keys and values of all ranks.
    /// `own` is this rank's block of keys and values.
    fn forward(&self, of: &PartialAttention, q: Tensor<4>, own: Tensor<3>) -> PartialResult;

    /// Returns the gradients of this rank's queries and of this rank's block of keys and values. `result` is the result
    /// of the forward pass, with the output in the dtype of the queries. `dout` is the gradient of the output.
    fn backward(
        &self,
        of: &PartialAttention,
        q: Tensor<4>,
        own: Tensor<3>,
        result: PartialResult,
        dout: Tensor<4>,
    ) -> PartialGradients;
}

/// A group of ranks that exchange keys and values. It consists of one rank from each group of neighbouring ranks.
#[derive(Clone, Debug)]
pub struct OuterGroup {
    /// The communicator of the group.
    pub comm: Comm,
    /// The number of ranks in a group of neighbours.
    pub neighbours: usize,
}

impl OuterGroup {
    /// Returns the ranks of the context group that rank `index` of the outer group represents: that rank and its
    /// neighbours.
    pub fn members(&self, index: usize) -> Members {
        index * self.neighbours..(index + 1) * self.neighbours
    }

    fn all(&self) -> Members {
        0..self.comm.size() * self.neighbours
    }
}

/// Ring attention: blocks of keys and values are sent around the ring. While a rank computes with a block, it receives
/// the next block.
///
/// Each rank sends `context - 1` blocks in the forward pass. In the backward pass the blocks are sent again. The sum of
/// the gradients of a block is sent along the ring one step after the block, and reaches the owner of the block after
/// `context - 1` steps. The owner adds the gradients from its own queries last. All sums are computed in f32 (in f64
/// for f64 inputs) and in a fixed order.
#[derive(Clone, Debug)]
pub struct Ring(pub OuterGroup);

/// All-gather: each rank gathers the blocks of all ranks in the forward pass, and again in the backward pass. The
/// gradients of the blocks are reduce-scattered.
///
/// The attention of each query is computed as on a single rank, with the same keys in the same order.
#[derive(Clone, Debug)]
pub struct AllGather(pub OuterGroup);

impl Ring {
    /// Calls `compute` with each block and the ranks that own it, starting with this rank's block. The next block is
    /// received during the computation.
    fn each_block(&self, own: Tensor<3>, mut compute: impl FnMut(&Tensor<3>, Members)) {
        RingAllGather::start(vec![own], &self.0.comm).each(|block, rank, _| {
            compute(&block, self.0.members(rank));
        });
    }
}

impl KeyValueExchange for Ring {
    fn forward(&self, of: &PartialAttention, q: Tensor<4>, own: Tensor<3>) -> PartialResult {
        let mut merged: Option<PartialResult> = None;
        self.each_block(own, |block, keys| {
            if let Some(part) = of.attend(&q, block, keys) {
                merged = Some(match merged.take() {
                    Some(before) => merge(before, part),
                    None => part,
                });
            }
        });
        merged.unwrap_or_else(|| unseen(&q))
    }

    fn backward(
        &self,
        of: &PartialAttention,
        q: Tensor<4>,
        own: Tensor<3>,
        result: PartialResult,
        dout: Tensor<4>,
    ) -> PartialGradients {
        let (dtype, travelling) = (wide(q.dtype()), of.travelling(q.dtype()));
        let mut dq = Tensor::zeros(q.dims(), (&q.device(), dtype));
        let zeros = Tensor::zeros(own.dims(), (&own.device(), dtype));
        let mut received: Option<PendingTensor<3>> = None;
        let mut compute = |part, block: &Tensor<3>, keys| {
            let (dq_part, block) = of.gradients_of(part, &q, block, keys, &result, &dout)?;
            dq = dq.clone() + dq_part;
            Some(block)
        };
        // One half of the own block is computed while the first block arrives, and the other half while the last sum
        // is sent.
        let mut of_own = None;
        let home = self.0.members(self.0.comm.rank());
        self.each_block(own.clone(), |block, keys| {
            if keys == home {
                of_own = compute(QueryPart::Last, block, keys);
                return;
            }
            let part = compute(QueryPart::All, block, keys);
            let before = received.take().map(PendingTensor::wait);
            let sum = match (before, part) {
                (Some(before), Some(part)) => before.cast(dtype) + part,
                (Some(sum), None) | (None, Some(sum)) => sum,
                (None, None) => zeros.clone(),
            };
            received = Some(start_ring_shift(sum.cast(travelling), &self.0.comm));
        });
        let rest = compute(QueryPart::First, &own, home);
        let of_others = received.map(|sum| sum.wait().cast(dtype));
        let parts = [of_own, rest, of_others].into_iter().flatten();
        let block = parts.reduce(|sum, part| sum + part).unwrap_or(zeros);
        (dq, block)
    }
}

impl AllGather {
    /// Gathers the keys and values of all ranks in ascending order.
    fn gathered(&self, of: &PartialAttention, own: Tensor<3>) -> Tensor<3> {
        let order = of.shard.order(self.0.all(), &own.device());
        let all = start_all_gather(own, 0, &self.0.comm).wait();
        order.ascending(all)
    }
}

impl KeyValueExchange for AllGather {
    fn forward(&self, of: &PartialAttention, q: Tensor<4>, own: Tensor<3>) -> PartialResult {
        let block = self.gathered(of, own);
        let result = of.attend(&q, &block, self.0.all());
        result.unwrap_or_else(|| unseen(&q))
    }

    fn backward(
        &self,
        of: &PartialAttention,
        q: Tensor<4>,
        own: Tensor<3>,
        result: PartialResult,
        dout: Tensor<4>,
    ) -> PartialGradients {
        let block = self.gathered(of, own);
        let (dtype, travelling) = (wide(q.dtype()), of.travelling(q.dtype()));
        let order = of.shard.order(self.0.all(), &q.device());
        let gradients = of.gradients(&q, &block, self.0.all(), &result, &dout);
        let (dq, block) = gradients.unwrap_or_else(|| {
            let options = (&q.device(), dtype);
            let dq = Tensor::zeros(q.dims(), options);
            (dq, Tensor::zeros(block.dims(), options))
        });
        let by_rank = order.by_rank(block).cast(travelling);
        let own = start_reduce_scatter(by_rank, 0, &self.0.comm).wait();
        (dq, own.cast(dtype))
    }
}
