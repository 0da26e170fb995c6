//! The state of an optimizer as a checkpoint sees it: tensors that lie like the parameters.

use burn::tensor::{DType, Tensor};

use crate::data_parallel::{BucketShard, BucketStep, SteppedBucket};

/// Prefix of a weight's path in the key of its first moment of AdamW.
pub const FIRST: &str = "adamw.first/";

/// Prefix of a weight's path in the key of its second moment of AdamW.
pub const SECOND: &str = "adamw.second/";

/// One tensor of the state for each of some parameters, such as their first moments.
pub struct StateKind {
    /// Prefix of a parameter's path in the key of its tensor.
    pub prefix: String,
    /// The type of each, in the order of the parameter table; `None` for a parameter without one.
    pub types: Vec<Option<DType>>,
}

impl StateKind {
    /// Of all parameters.
    pub fn of_all(prefix: impl Into<String>, types: Vec<DType>) -> Self {
        Self {
            prefix: prefix.into(),
            types: types.into_iter().map(Some).collect(),
        }
    }
}

/// The state of an optimizer that a checkpoint saves and restores.
pub trait OptimizerState {
    /// Its tensors. `masters` are the types of the masters, in the order of the parameter table.
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind>;

    /// The tensor of each kind for this rank's shard of a bucket, `[elements]`; zeros before the first step, and where a
    /// parameter has none.
    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>>;

    /// Restores the shard of a bucket, from tensors as [`tensors`](Self::tensors) returns them, as of `steps` steps.
    fn restore(&mut self, bucket: usize, shard: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64);
}

/// An optimizer whose rule needs nothing but this rank's shards.
pub(crate) trait ShardOptimizer: OptimizerState + Send {
    /// Steps a bucket, with `factor` times its gradient.
    fn step_bucket(&mut self, rate: f64, factor: f64, bucket: BucketStep) -> SteppedBucket;
}
