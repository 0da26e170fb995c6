//! FP8 weights: computes both copies of every weight on every rank from the sharded master weights.
//!
//! A weight with a per-tensor scale (delayed, current) is gathered as FP8 codes, one byte per element:
//!
//! ```text
//! masters   | rank 0 | rank 1 |      f32, stepped
//! amax      of the slices of each weight that lie in the shard
//!           one max-reduction over the data axis and one over the tensor axis, for all weights
//! codes     | rank 0 | rank 1 |      encode(master * scale)
//! gathered  |   all codes     |      as words of four codes
//! stored    rowwise [in, out], columnwise [out, in]
//! ```
//!
//! A weight with block scales cannot be gathered as codes, because its two copies have different codes and
//! shards do not end at block boundaries. Its values are gathered in the dtype of the model and quantized on
//! every rank.
//!
//! In Megatron-LM (`reuse_grad_buf_for_mxfp8_param_ag`) the gathered values reuse the gradient buffer. Here buffers are
//! tensors, and their lifetimes do not overlap. The step frees all gradients before the first bucket is gathered. The
//! values of a bucket are freed before the next bucket is gathered, and the last values are quantized before a gradient
//! is allocated. Therefore gathered values are counted in the memory category of gradients, and do not increase its
//! peak. Gradient buffers are not filled with zeros: the first gradient of a parameter is written, not added.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::memory_usage::{MemoryCategory, TrackedAllocation};
use super::sharding_plan::ShardingPlan;
use crate::collective::{PendingPacked, PendingTensor};
use crate::nn::fp8::QuantizedWeight;

mod codes;
mod quantized_bytes;
mod values;

pub(super) use codes::start as start_codes;
pub(super) use quantized_bytes::quantized_bytes;
pub(super) use values::start as start_values;

/// The FP8 weights of a bucket.
#[derive(Default)]
pub(super) enum Fp8Weights {
    /// The weights are out of date, or the bucket has no FP8 weights.
    #[default]
    Stale,
    /// An all-gather of codes is in flight, with its memory and the descale of each weight.
    GatheringCodes(Box<PendingPacked>, TrackedAllocation, Vec<Tensor<1>>),
    /// An all-gather of values is in flight, with its memory.
    GatheringValues(Box<PendingTensor<1>>, TrackedAllocation),
    /// The weights are ready, one per parameter of the bucket.
    Ready {
        weights: Vec<Arc<QuantizedWeight>>,
        _allocation: TrackedAllocation,
    },
}

impl Fp8Weights {
    /// Waits for a gather in flight, quantizes its result, and returns the weights.
    pub fn wait(&mut self, number: usize, plan: &ShardingPlan) -> &[Arc<QuantizedWeight>] {
        *self = match std::mem::take(self) {
            Self::GatheringCodes(pending, allocation, descales) => {
                let weights = codes::weights(number, &pending.wait(), descales, plan);
                drop(allocation);
                Self::ready(weights, plan)
            }
            Self::GatheringValues(pending, allocation) => {
                let values = pending.wait();
                let weights = values::weights(number, &values, plan);
                values::discard(number, values, plan);
                drop(allocation);
                Self::ready(weights, plan)
            }
            other => other,
        };
        match self {
            Self::Ready { weights, .. } => weights,
            _ => unreachable!("FP8 weights are quantised before they are used"),
        }
    }

    /// Whether a gather of values is in flight.
    pub fn is_gathering_values(&self) -> bool {
        matches!(self, Self::GatheringValues(..))
    }

    /// Whether a gather is in flight.
    pub fn is_gathering(&self) -> bool {
        matches!(self, Self::GatheringCodes(..) | Self::GatheringValues(..))
    }

    fn ready(weights: Vec<QuantizedWeight>, plan: &ShardingPlan) -> Self {
        let bytes = |weight: &QuantizedWeight| weight.rowwise.bytes() + weight.columnwise.bytes();
        let bytes = weights.iter().map(bytes).sum();
        Self::Ready {
            weights: weights.into_iter().map(Arc::new).collect(),
            _allocation: plan.usage.track(MemoryCategory::Parameters, bytes),
        }
    }
}
