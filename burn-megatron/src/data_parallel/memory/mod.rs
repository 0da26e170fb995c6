//! The memory of a rank's training state, computed before it is allocated.
//!
//! With `p` and `g` bytes per element of the parameters and the gradients, `s` of the optimizer state (the
//! moments, a 4-byte master unless the parameter is its own master, and a 4-byte copy of a 16-bit gradient if
//! one is kept), and buckets sharded over `d` ranks, a parameter takes
//!
//! | stage | bytes | 16-bit, f32 gradients, Adam | f32, Adam |
//! |---|---|---|---|
//! | 0 | `p + g + s` | 18 | 16 |
//! | 1 | `p + g + s / d` | `6 + 12 / d` | `8 + 8 / d` |
//! | 2 | `p + (g + s) / d` | `2 + 16 / d` | `4 + 12 / d` |
//! | 3 | `(p + g + s) / d` | `18 / d` | `16 / d` |
//!
//! An FP8 weight has two copies, rowwise and columnwise, with their scales instead of the `p` bytes, and always
//! has a master: stage 1 takes `2 + g + (4 + 2 * 4) / d` bytes, stage 2 `2 + (g + 12) / d`.
//!
//! Source: ZeRO (Rajbhandari et al., 2020, section 3 and figure 1). The elements are those of a
//! [`BufferLayout`], padding included. Activations are not included.

use serde::{Deserialize, Serialize};

use super::config::{DataParallelConfig, Moments};
use super::layout::{Bucket, BufferKey, BufferLayout, FlatBuffer};
use crate::comm::DType;
pub use crate::mesh::{ParseZeroStageError, ZeroStage};

pub mod host_memory;
mod table;
#[cfg(test)]
mod tests;
mod transient_buffers;

pub use table::format_bytes;
use transient_buffers::{element_bytes, gathered_units, transient_buffers};

/// The training state per parameter, and which of it is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRules {
    /// The sharded state.
    pub stage: ZeroStage,
    /// Hybrid sharding: the ranks over which a copy is sharded. `None`: those over which the layout shards buckets.
    pub shards: Option<usize>,
    /// Whether parameters of less than 32 bits have f32 masters. Wider parameters are their own masters.
    pub masters: bool,
    /// Whether the optimizer keeps f32 copies of gradients of less than 32 bits.
    pub gradient_copies: bool,
    /// The number of moments of the optimizer: 2 for Adam.
    pub moments: u8,
    /// The dtype of the moments.
    pub moment: DType,
    /// Whether gradients and gathered parameters have [static buffers](DataParallelConfig::static_buffers).
    pub static_buffers: bool,
    /// Whether gradients are summed over several ranks.
    pub summed: bool,
    /// The buckets from number 0 on whose masters and moments are on the host; see
    /// [`OffloadPlan`](super::OffloadPlan).
    pub offloaded: usize,
}

impl MemoryRules {
    /// Adam with f32 moments, f32 masters, and no copies of the gradients.
    pub fn adam(stage: ZeroStage) -> Self {
        Self {
            stage,
            shards: None,
            masters: true,
            gradient_copies: false,
            moments: 2,
            moment: DType::F32,
            static_buffers: false,
            summed: true,
            offloaded: 0,
        }
    }

    /// The rules of `config`.
    pub fn of(config: &DataParallelConfig) -> Self {
        Self {
            shards: config.hsdp,
            moments: config.state_tensors,
            static_buffers: config.static_buffers,
            moment: match config.moments {
                Moments::F32 => DType::F32,
                Moments::Bf16 => DType::BF16,
            },
            ..Self::adam(config.zero_stage)
        }
    }

    /// Bytes of one moment of an element. Moments of f64 parameters are f64.
    fn moment_bytes(&self, key: BufferKey) -> u128 {
        match (self.moment, key.gradient) {
            (DType::F32, DType::F64) => element_bytes(DType::F64),
            (moment, _) => element_bytes(moment),
        }
    }

    /// The elements of a bucket that one rank steps.
    pub(super) fn stepped_elements(&self, bucket: &Bucket) -> usize {
        match (self.stage, self.shards) {
            (ZeroStage::Replicated, _) => bucket.padded(),
            (_, None) => bucket.shard_elements(),
            (_, Some(shards)) => bucket.padded() / shards,
        }
    }

    /// Bytes of a bucket's optimizer state that one rank has, if it is on the device.
    pub(super) fn state_of(&self, buffer: &FlatBuffer, bucket: &Bucket) -> u128 {
        self.stepped_elements(bucket) as u128 * self.state_bytes(buffer.key)
    }

    /// Bytes of a bucket's optimizer state on the host, which has a master in any case.
    fn host_state_of(&self, buffer: &FlatBuffer, bucket: &Bucket) -> u128 {
        let moments = u128::from(self.moments) * self.moment_bytes(buffer.key);
        let per_element = element_bytes(buffer.key.gradient) + moments;
        self.stepped_elements(bucket) as u128 * per_element
    }

    /// Elements of one rank's shard.
    fn shard_elements(&self, buffer: &FlatBuffer) -> usize {
        match self.shards {
            None => buffer.shard_elements(),
            Some(shards) => buffer.elements / shards,
        }
    }

    /// Bytes of optimizer state per element.
    fn state_bytes(&self, key: BufferKey) -> u128 {
        let f32_bytes = element_bytes(DType::F32);
        let f32_copy = |is_kept: bool, dtype: DType| {
            if is_kept && element_bytes(dtype) < f32_bytes {
                f32_bytes
            } else {
                0
            }
        };
        let master = if key.quantized && self.masters {
            // Neither codes nor temporary gathered values can be the master.
            element_bytes(key.gradient)
        } else {
            f32_copy(self.masters, key.parameter)
        };
        master
            + f32_copy(self.gradient_copies, key.gradient)
            + u128::from(self.moments) * self.moment_bytes(key)
    }
}

/// Why the memory cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// A stage that requires sharded buckets, with a layout that has none.
    #[error(
        "ZeRO stage {stage} requires sharded buckets, but this layout has none; use sharded rules for the \
         layout, or stage 0"
    )]
    NotSharded {
        /// The stage.
        stage: ZeroStage,
    },
    /// The bytes overflow a `u64`.
    #[error(
        "the state of one rank takes {bytes} bytes, which overflows 64 bits; split the model over more ranks"
    )]
    Overflow {
        /// The total.
        bytes: u128,
    },
}

fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// Bytes of one rank by category, computed or measured.
///
/// Displayed as a table with a row per category and a total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryPlan {
    /// Parameters in the dtype of the model: all, or the rank's shard in stage 3. f32 parameters are their own
    /// masters, and count here only. FP8 weights count with both copies and their scales.
    pub parameters: u64,
    /// Gradients: all, or the rank's shard from stage 2 on. With static buffers all, and over several ranks also their sums: all,
    /// or the rank's shard from stage 1 on.
    pub gradients: u64,
    /// Masters of 16-bit parameters, f32 copies of 16-bit gradients, and moments: all, or the rank's
    /// shard from stage 1 on.
    pub optimizer: u64,
    /// Masters and moments of offloaded buckets, in the memory of the host. Parameters in f32 have a master there
    /// too. Not part of the [total](Self::total).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub host_optimizer: u64,
    /// Temporary buffers: the peak of what collectives and unsharded units need at once.
    ///
    /// - Stage 0: none, since gradients are reduced in place.
    /// - Stage 1: the larger of the rank's shard of the largest bucket, while it is stepped, and the FP8 codes of
    ///   all weights, until the copies are made from them. Values that are gathered to be quantised are not
    ///   included: one bucket at a time, they reuse the memory of its gradients.
    /// - Stage 2: the larger of that and the full gradients of two adjacent buckets of each buffer, of which one
    ///   is filled while the other is reduced, and of all shared buckets, which are filled throughout
    ///   backward; with hybrid sharding also the rank's shard of the bucket before, which is summed over the replicas. The step follows backward, so the two do not add up.
    /// - Stage 3: those gradients, and the unsharded parameters of the two largest adjacent units of the model:
    ///   the current one and the prefetched one. Backward needs both at once.
    /// - Stages 1 and 2 with static buffers: the larger of that of stage 1 and all parameters, which are gathered and then
    ///   copied to their place.
    pub buffers: u64,
}

impl MemoryPlan {
    /// Computes the memory of one rank of `layout`.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotSharded`] from stage 1 on if the layout does not shard its buckets;
    /// [`MemoryError::Overflow`] if the total overflows 64 bits.
    pub fn new(layout: &BufferLayout, rules: &MemoryRules) -> Result<Self, MemoryError> {
        let stage = rules.stage;
        if stage > ZeroStage::Replicated && !layout.rules().sharded {
            return Err(MemoryError::NotSharded { stage });
        }
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
                // Sums over ranks or micro-batches are not in the static buffers.
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

    /// The memory of frozen parameters: the parameters, or the shards of them, and in stage 3 the units that are gathered
    /// at once.
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

    /// The sum of both, by category.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            parameters: self.parameters.saturating_add(other.parameters),
            gradients: self.gradients.saturating_add(other.gradients),
            optimizer: self.optimizer.saturating_add(other.optimizer),
            host_optimizer: self.host_optimizer.saturating_add(other.host_optimizer),
            buffers: self.buffers.saturating_add(other.buffers),
        }
    }

    /// The sum of all categories on the device.
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
