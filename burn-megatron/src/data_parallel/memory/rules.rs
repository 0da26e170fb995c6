//! The training state per parameter.

use crate::comm::DType;
use crate::data_parallel::config::DataParallelConfig;
use crate::data_parallel::layout::{Bucket, BufferKey, FlatBuffer};
use crate::data_parallel::precision::Moments;
use crate::mesh::ZeroStage;

/// The rules for computing the memory of a rank: the training state per parameter, and the part of the state that is
/// sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRules {
    /// The ZeRO stage, which selects the sharded state.
    pub stage: ZeroStage,
    /// The number of ranks in a shard group, with hybrid sharding (HSDP). `None`: the number of ranks over which the
    /// layout shards buckets.
    pub shards: Option<usize>,
    /// The number of moments of the optimizer: 2 for Adam.
    pub moments: u8,
    /// The dtype of the moments.
    pub moment: DType,
    /// Whether gradients and gathered parameters have [static buffers](DataParallelConfig::static_buffers).
    pub static_buffers: bool,
    /// Whether the gradients are summed over several ranks.
    pub summed: bool,
    /// The number of buckets, counted from bucket 0, whose master weights and moments are in host memory. See
    /// [`OffloadPlan`](crate::data_parallel::OffloadPlan).
    pub offloaded: usize,
}

impl MemoryRules {
    /// Returns the memory rules for Adam with `f32` moments.
    pub fn adam(stage: ZeroStage) -> Self {
        Self {
            stage,
            shards: None,
            moments: 2,
            moment: DType::F32,
            static_buffers: false,
            summed: true,
            offloaded: 0,
        }
    }

    /// Returns the memory rules for the settings `config`.
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

    /// Returns the bytes of one moment of an element. Moments of f64 parameters are f64.
    fn moment_bytes(&self, key: BufferKey) -> u128 {
        match (self.moment, key.gradient) {
            (DType::F32, DType::F64) => element_bytes(DType::F64),
            (moment, _) => element_bytes(moment),
        }
    }

    /// Returns the number of elements of a bucket that one rank updates in the optimizer step.
    pub(in crate::data_parallel) fn stepped_elements(&self, bucket: &Bucket) -> usize {
        match (self.stage, self.shards) {
            (ZeroStage::Replicated, _) => bucket.padded(),
            (_, None) => bucket.shard_elements(),
            (_, Some(shards)) => bucket.padded() / shards,
        }
    }

    /// Returns the bytes of a bucket's optimizer state on one rank, if it is on the device.
    pub(in crate::data_parallel) fn state_of(&self, buffer: &FlatBuffer, bucket: &Bucket) -> u128 {
        self.stepped_elements(bucket) as u128 * self.state_bytes(buffer.key)
    }

    /// Returns the bytes of a bucket's optimizer state on the host, which always includes a master weight.
    pub(super) fn host_state_of(&self, buffer: &FlatBuffer, bucket: &Bucket) -> u128 {
        let moments = u128::from(self.moments) * self.moment_bytes(buffer.key);
        let per_element = element_bytes(buffer.key.gradient) + moments;
        self.stepped_elements(bucket) as u128 * per_element
    }

    /// Returns the number of elements of one rank's shard.
    pub(super) fn shard_elements(&self, buffer: &FlatBuffer) -> usize {
        match self.shards {
            None => buffer.shard_elements(),
            Some(shards) => buffer.elements / shards,
        }
    }

    /// Returns the bytes of optimizer state per element.
    fn state_bytes(&self, key: BufferKey) -> u128 {
        let f32_bytes = element_bytes(DType::F32);
        let master = if key.quantized {
            // Neither codes nor temporary gathered values can be the master weights.
            element_bytes(key.gradient)
        } else if element_bytes(key.parameter) < f32_bytes {
            f32_bytes
        } else {
            // The parameter is its own master weight.
            0
        };
        master + u128::from(self.moments) * self.moment_bytes(key)
    }
}

/// Returns the bytes of an element.
pub(super) fn element_bytes(dtype: DType) -> u128 {
    dtype.size_of() as u128
}
