//! Weights that are kept in 8 bits: from the masters, of which each rank steps a shard, to both copies
//! of every weight on every rank.
//!
//! A weight with one scale (delayed, current) travels as codes, one byte for an element:
//!
//! ```text
//! masters   | rank 0 | rank 1 |      f32, stepped
//! amax      of the pieces of each weight that lie in the shard
//!           one maximum over the data axis and one over the tensor axis, for all weights
//! codes     | rank 0 | rank 1 |      encode(master * scale)
//! gathered  |     whole       |      as words of four codes
//! kept      rowwise [in, out], columnwise [out, in]
//! ```
//!
//! A weight with block scales cannot: its two copies have other codes, and blocks do not end where
//! shards do. It is gathered in the type of the model and quantised where it arrives (in Megatron-LM:
//! `reuse_grad_buf_for_mxfp8_param_ag`). There the gathered values lie in the memory of the gradients.
//! Here buffers are tensors, and the same memory is had by when they live: the step has given all
//! gradients back before the first bucket is gathered, a bucket is gathered when the values of the one
//! before it are gone, and the last one is quantised before a gradient needs memory again. So values
//! count as the gradients of their bucket, and never add to them. Gradients need no zeros: the first
//! one of a parameter is written, not added.

use std::sync::Arc;

use burn::tensor::Tensor;

use super::plan::{Kept, Plan};
use super::usage::{Category, Holding};
use crate::collective::{PendingTensor, PendingWords};
use crate::nn::fp8::{QuantizedWeight, WeightQuantizer};

mod codes;
mod size;
mod values;

pub(super) use codes::start as start_codes;
pub(super) use size::bytes;
pub(super) use values::start as start_values;

/// The 8-bit weights of a bucket.
#[derive(Default)]
pub(super) enum Weights {
    /// They are out of date, or there are none.
    #[default]
    Away,
    /// Codes are being gathered.
    Codes(Coming<PendingWords>, Vec<Tensor<1>>),
    /// Values are being gathered.
    Values(Coming<PendingTensor<1>>),
    /// By place in the bucket.
    Here {
        weights: Vec<Arc<QuantizedWeight>>,
        _held: Holding,
    },
}

/// Something under way, with its bytes.
pub(super) struct Coming<P> {
    pending: Box<P>,
    held: Holding,
}

impl Weights {
    /// The weights; waits for them where they are on their way.
    pub fn here(&mut self, number: usize, plan: &Plan) -> &[Arc<QuantizedWeight>] {
        *self = match std::mem::take(self) {
            Self::Codes(Coming { pending, held }, descales) => {
                let weights = codes::weights(number, &pending.wait(), descales, plan);
                drop(held);
                Self::hold(weights, plan)
            }
            Self::Values(Coming { pending, held }) => {
                let values = pending.wait();
                let weights = values::weights(number, &values, plan);
                values::discard(number, values, plan);
                drop(held);
                Self::hold(weights, plan)
            }
            other => other,
        };
        match self {
            Self::Here { weights, .. } => weights,
            _ => unreachable!("8-bit weights are made of the masters before they are used"),
        }
    }

    /// Whether values are gathered, in the place of gradients.
    pub fn are_values(&self) -> bool {
        matches!(self, Self::Values(_))
    }

    /// Whether they are on their way.
    pub fn are_coming(&self) -> bool {
        matches!(self, Self::Codes(..) | Self::Values(_))
    }

    fn hold(weights: Vec<QuantizedWeight>, plan: &Plan) -> Self {
        let bytes = |weight: &QuantizedWeight| weight.rowwise.bytes() + weight.columnwise.bytes();
        let bytes = weights.iter().map(bytes).sum();
        Self::Here {
            weights: weights.into_iter().map(Arc::new).collect(),
            _held: plan.usage.hold(Category::Parameters, bytes),
        }
    }
}

/// How a weight is kept that is quantised in this way.
pub(super) fn kept(quantizer: &dyn WeightQuantizer) -> Kept {
    match quantizer.has_one_scale() {
        true => Kept::Codes,
        false => Kept::Blocks,
    }
}
