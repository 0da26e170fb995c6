//! Computes the memory of a rank's training state before the memory is allocated.
//!
//! Let `p` and `g` be the bytes per element of the parameters and the gradients, and let `s` be the bytes per element
//! of the optimizer state. The optimizer state consists of the moments, and of a 4-byte master weight unless the
//! parameter is its own master weight. If buckets are sharded over `d` ranks, an element of a parameter needs the
//! following number of bytes on each rank:
//!
//! | stage | bytes | 16-bit, f32 gradients, Adam | f32, Adam |
//! |---|---|---|---|
//! | 0 | `p + g + s` | 18 | 16 |
//! | 1 | `p + g + s / d` | `6 + 12 / d` | `8 + 8 / d` |
//! | 2 | `p + (g + s) / d` | `2 + 16 / d` | `4 + 12 / d` |
//! | 3 | `(p + g + s) / d` | `18 / d` | `16 / d` |
//!
//! An FP8 weight is stored as a rowwise and a columnwise copy with their scales, instead of `p` bytes per element. It
//! always has a master weight. Stage 1 needs `2 + g + (4 + 2 * 4) / d` bytes, and stage 2 needs `2 + (g + 12) / d`
//! bytes.
//!
//! Source: ZeRO (Rajbhandari et al., 2020, section 3 and figure 1). The number of elements is taken from a
//! [`BufferLayout`], including padding. Activations are not included.

use serde::{Deserialize, Serialize};

use super::error::MemoryError;
use super::layout::{BufferLayout, FlatBuffer};
pub use crate::mesh::{ParseZeroStageError, ZeroStage};

pub mod host_memory;
mod rules;
mod table;
#[cfg(test)]
mod tests;
mod transient_buffers;

pub use rules::MemoryRules;
use rules::element_bytes;
pub use table::format_bytes;
use transient_buffers::{gathered_units, transient_buffers};

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// The memory of one rank in bytes, by category. The memory is either computed or measured.
///
/// A plan is displayed as a table with a row for each category and a row for the total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// The bytes of the parameters in the dtype of the model: all parameters, or the rank's shard with ZeRO stage 3.
    /// f32 parameters are their own master weights and are only counted here. FP8 weights are counted with both copies
    /// and their scales.
    pub parameters: u64,
    /// The bytes of the gradients: all gradients, or the rank's shard with ZeRO stages 2 and 3. With static buffers,
    /// all gradients are counted. If gradients are also summed over several ranks, the sums are counted in addition:
    /// all sums, or the rank's shard with ZeRO stages 1 to 3.
    pub gradients: u64,
    /// The bytes of the optimizer state: the master weights of 16-bit parameters, and the moments. With ZeRO stages 1
    /// to 3, only the rank's shard is counted.
    pub optimizer: u64,
    /// The bytes of the master weights and moments of offloaded buckets, which are in host memory. In offloaded
    /// buckets, f32 parameters also have a master weight. Not included in the [total](Self::total).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_optimizer: u64,
    /// The bytes of temporary buffers: the peak memory that collectives and unsharded FSDP units need at the same time.
    ///
    /// - Stage 0: none, because gradients are reduced in place.
    /// - Stage 1: the maximum of two sizes. The first size is the size of the rank's shard of the largest bucket, which
    ///   exists during the optimizer step of the bucket. The second size is the size of the FP8 codes of all weights,
    ///   which exist until both copies of the weights are computed from the codes. Values that are gathered to be
    ///   quantized are not included: they are gathered one bucket at a time and reuse the memory of the gradients of
    ///   the bucket.
    /// - Stage 2: the maximum of the buffers of stage 1 and the gradients in flight. The gradients in flight are the
    ///   full gradients of two adjacent buckets of each buffer: one bucket is filled while the other is reduced. They
    ///   include the full gradients of all shared buckets, which are filled throughout the backward. With hybrid
    ///   sharding they also include the rank's shard of the previous bucket, which is summed over the replicas. The
    ///   optimizer step follows the backward, so the two sizes are not added.
    /// - Stage 3: the sum of the gradients in flight and of the unsharded parameters of two adjacent FSDP units, the
    ///   current unit and the prefetched unit. The largest pair of adjacent units is counted. The backward needs the
    ///   gradients and the parameters at the same time.
    /// - Stages 1 and 2 with static buffers: the maximum of the buffers of stage 1 and all parameters, which
    ///   are gathered and then copied to their static address.
    pub buffers: u64,
}

impl MemoryPlan {
    /// Computes the memory of one rank from the layout of its buffers.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Overflow`] if the total overflows 64 bits.
    pub fn new(layout: &BufferLayout, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let stage = rules.stage;
        let elements = |buffer: &FlatBuffer, sharded_from: ZeroStage| {
            if stage >= sharded_from {
                rules.shard_elements(buffer) as u128
            } else {
                buffer.elements as u128
            }
        };
        let sum = |bytes: &dyn Fn(&FlatBuffer) -> u128| layout.buffers.iter().map(bytes).sum();
        let parameters = sum(&|buffer| {
            if buffer.key.quantized {
                buffer.quantized_bytes as u128
            } else {
                elements(buffer, ZeroStage::Parameters) * element_bytes(buffer.key.parameter)
            }
        });
        let gradients = sum(&|buffer| {
            let has_sums = rules.summed || stage >= ZeroStage::Gradients;
            let elements = match (rules.static_buffers, has_sums) {
                (false, _) => elements(buffer, ZeroStage::Gradients),
                (true, false) => buffer.elements as u128,
                // Sums over ranks or micro-batches are not stored in the static buffers.
                (true, true) => buffer.elements as u128 + elements(buffer, ZeroStage::Optimizer),
            };
            elements * element_bytes(buffer.key.gradient)
        });
        let (mut optimizer, mut host_optimizer) = (0, 0);
        for (number, buffer, bucket) in layout.buckets() {
            if number < rules.offloaded {
                host_optimizer += rules.host_state_of(buffer, bucket);
            } else {
                optimizer += rules.state_of(buffer, bucket);
            }
        }
        let all = [
            parameters,
            gradients,
            optimizer,
            host_optimizer,
            transient_buffers(layout, rules),
        ];
        let bytes = all.iter().sum();
        if bytes > u128::from(u64::MAX) {
            return Err(MemoryError::Overflow { bytes });
        }
        let [parameters, gradients, optimizer, host_optimizer, buffers] =
            all.map(|bytes| bytes as u64);
        Ok(Self {
            parameters,
            gradients,
            optimizer,
            host_optimizer,
            buffers,
        })
    }

    /// Computes the memory of frozen parameters. It is the size of all frozen parameters. With ZeRO stage 3, it is the
    /// size of the rank's shards and of the FSDP units that are gathered at the same time.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Overflow`] if the total overflows 64 bits.
    pub fn of_frozen(layout: &BufferLayout, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let is_sharded = rules.stage == ZeroStage::Parameters;
        let bytes = |buffer: &FlatBuffer| {
            let elements = if is_sharded {
                rules.shard_elements(buffer)
            } else {
                buffer.elements
            };
            elements as u128 * element_bytes(buffer.key.parameter)
        };
        let parameters = layout.buffers.iter().map(bytes).sum::<u128>();
        let buffers = if is_sharded {
            gathered_units(layout)
        } else {
            0
        };
        match (u64::try_from(parameters), u64::try_from(buffers)) {
            (Ok(parameters), Ok(buffers)) => Ok(Self {
                parameters,
                buffers,
                ..Self::default()
            }),
            _ => Err(MemoryError::Overflow {
                bytes: parameters + buffers,
            }),
        }
    }

    /// Returns the sum of this plan and another plan, by category.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            gradients: self.gradients.saturating_add(other.gradients),
            optimizer: self.optimizer.saturating_add(other.optimizer),
            host_optimizer: self.host_optimizer.saturating_add(other.host_optimizer),
            buffers: self.buffers.saturating_add(other.buffers),
        }
    }

    /// Returns the total memory on the device, in bytes: the sum of all categories except `host_optimizer`.
    pub fn total(&self) -> u64 {
        let rows = [
            self.parameters,
            self.gradients,
            self.optimizer,
            self.buffers,
        ];
        rows.into_iter().fold(0, u64::saturating_add)
    }
}
