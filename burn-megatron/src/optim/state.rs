//! The state of an optimizer that checkpoints save. It consists of tensors that are sharded like the parameters.

use burn::tensor::{DType, Tensor};

use crate::data_parallel::{BucketShard, BucketStep, SteppedBucket};

/// The prefix of a weight's path in the key of its first AdamW moment.
pub const FIRST: &str = "adamw.first/";

/// The prefix of a weight's path in the key of its second AdamW moment.
pub const SECOND: &str = "adamw.second/";

/// A kind of optimizer state, such as the first moment. It has one tensor per parameter.
pub struct StateKind {
    /// The prefix of a parameter's path in the key of its state tensor.
    pub prefix: String,
    /// The dtype of each tensor, in the order of the parameter table. `None` for a parameter that has no state tensor
    /// of this kind.
    pub types: Vec<Option<DType>>,
}

impl StateKind {
    /// Creates a kind that has a tensor for every parameter.
    pub fn of_all(prefix: impl Into<String>, types: Vec<DType>) -> Self {
        Self {
            prefix: prefix.into(),
            types: types.into_iter().map(Some).collect(),
        }
    }
}

/// The state of an optimizer that a checkpoint saves and restores.
pub trait OptimizerState {
    /// Returns the kinds of state that the optimizer has. `masters` contains the dtypes of the master weights, in the
    /// order of the parameter table.
    fn kinds(&self, masters: &[DType]) -> Vec<StateKind>;

    /// Returns the state of this rank's shard of a bucket: one tensor `[elements]` for each kind. The elements are zero
    /// before the first step, and for parameters that have no state of this kind.
    fn tensors(&self, bucket: usize, shard: &BucketShard) -> Vec<Tensor<1>>;

    /// Restores the state of this rank's shard of a bucket. `tensors` has the format that [`tensors`](Self::tensors)
    /// returns, and `steps` is the number of steps after which the state was saved.
    fn restore(&mut self, bucket: usize, shard: &BucketShard, tensors: Vec<Tensor<1>>, steps: u64);
}

/// An optimizer whose update rule only needs this rank's shards.
pub(crate) trait ShardOptimizer: OptimizerState + Send {
    /// Updates a bucket with `factor` times its gradient.
    fn step_bucket(&mut self, rate: f64, factor: f64, bucket: BucketStep) -> SteppedBucket;
}
