//! The state of an optimizer in a checkpoint: tensors that are sharded like the parameters.

use burn::tensor::{DType, Tensor};

use crate::data_parallel::{BucketShard, BucketStep, SteppedBucket};

/// Prefix of a weight's path in the key of its first moment of AdamW.
pub const FIRST: &str = "adamw.first/";

/// Prefix of a weight's path in the key of its second moment of AdamW.
pub const SECOND: &str = "adamw.second/";

/// One kind of state tensor, such as the first moment, with one tensor per parameter.
pub struct StateKind {
    /// Prefix of a parameter's path in the key of its tensor.
    pub prefix: String,
    /// The type of each tensor, in the order of the parameter table; `None` for a parameter without a tensor.
    pub types: Vec<Option<DType>>,
}

impl StateKind {
    /// Returns a kind with a tensor for every parameter.
    pub fn of_all(prefix: impl Into<String>, types: Vec<DType>) -> Self {
        Self {
            prefix: prefix.into(),
            types: types.into_iter().map(Some).collect(),
        }
    }
}

/// The state of an optimizer that a checkpoint saves and restores.
pub trait OptimizerState {
    /// Returns the kinds of its tensors. `masters` are the types of the masters, in the order of the parameter
    /// table.
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind>;

    /// Returns the tensor of each kind for this rank's shard of a bucket, `[elements]`. It is zero before the
    /// first step, and for parameters without a tensor.
    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>>;

    /// Restores the shard of a bucket after `steps` steps, from tensors in the format of
    /// [`tensors`](Self::tensors).
    fn restore(&mut self, bucket: usize, shard: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64);
}

/// An optimizer whose update rule only needs this rank's shards.
pub(crate) trait ShardOptimizer: OptimizerState + Send {
    /// Updates a bucket with `factor` times its gradient.
    fn step_bucket(&mut self, rate: f64, factor: f64, bucket: BucketStep) -> SteppedBucket;
}
