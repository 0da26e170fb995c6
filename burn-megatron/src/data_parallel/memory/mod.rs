//! The memory of a rank's training state, computed before it is allocated.
//!
//! Let `p` and `g` be the bytes per element of the parameters and the gradients, and `s` the bytes of the
//! optimizer state. The optimizer state consists of the moments, and of a 4-byte master unless the parameter is
//! its own master. With buckets sharded over `d` ranks, a parameter needs
//!
//! | stage | bytes | 16-bit, f32 gradients, Adam | f32, Adam |
//! |---|---|---|---|
//! | 0 | `p + g + s` | 18 | 16 |
//! | 1 | `p + g + s / d` | `6 + 12 / d` | `8 + 8 / d` |
//! | 2 | `p + (g + s) / d` | `2 + 16 / d` | `4 + 12 / d` |
//! | 3 | `(p + g + s) / d` | `18 / d` | `16 / d` |
//!
//! An FP8 weight has two copies, rowwise and columnwise, with their scales, instead of the `p` bytes. It always
//! has a master: stage 1 needs `2 + g + (4 + 2 * 4) / d` bytes, stage 2 `2 + (g + 12) / d`.
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

/// Bytes of one rank by category, computed or measured.
///
/// Displayed as a table with a row per category and a total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Parameters in the dtype of the model: all parameters, or the rank's shard in stage 3. f32 parameters are
    /// their own masters and count only here. FP8 weights count with both copies and their scales.
    pub parameters: u64,
    /// Gradients: all gradients, or the rank's shard from stage 2 on. With static buffers the full gradients
    /// count. Over several ranks their sums count as well: all sums, or the rank's shard from stage 1 on.
    pub gradients: u64,
    /// Masters of 16-bit parameters and moments: all of them, or the rank's shard from stage 1 on.
    pub optimizer: u64,
    /// Masters and moments of offloaded buckets, in host memory. There, f32 parameters also have a master. Not
    /// included in the [total](Self::total).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_optimizer: u64,
    /// Temporary buffers: the peak memory that collectives and unsharded units need at once.
    ///
    /// - Stage 0: none, because gradients are reduced in place.
    /// - Stage 1: the maximum of two sizes. One is the rank's shard of the largest bucket, while it is stepped.
    ///   The other is the FP8 codes of all weights, until the copies are made from them. Values that are
    ///   gathered to be quantized are not included: they are gathered one bucket at a time and reuse the memory
    ///   of the bucket's gradients.
    /// - Stage 2: the maximum of the buffers of stage 1 and the gradients in flight. The gradients in flight
    ///   are the full gradients of two adjacent buckets of each buffer, one being filled and one being reduced,
    ///   and of all shared buckets, which are filled throughout backward. With hybrid sharding they include the
    ///   rank's shard of the previous bucket, which is summed over the replicas. The step follows backward, so
    ///   the two sizes do not add up.
    /// - Stage 3: the gradients in flight, and the unsharded parameters of the two largest adjacent units of
    ///   the model, the current and the prefetched unit. Backward needs both at once.
    /// - Stages 1 and 2 with static buffers: the maximum of the buffers of stage 1 and all parameters, which
    ///   are gathered and then copied to their static address.
    pub buffers: u64,
}

impl MemoryPlan {
    /// Computes the memory of one rank of `layout`.
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

    /// Computes the memory of frozen parameters: the parameters or their shards, and in stage 3 the units that
    /// are gathered at once.
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

    /// Returns the sum of both plans, by category.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            gradients: self.gradients.saturating_add(other.gradients),
            optimizer: self.optimizer.saturating_add(other.optimizer),
            host_optimizer: self.host_optimizer.saturating_add(other.host_optimizer),
            buffers: self.buffers.saturating_add(other.buffers),
        }
    }

    /// Returns the sum of all categories on the device.
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
