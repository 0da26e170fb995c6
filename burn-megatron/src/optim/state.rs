//! The optimizer state that checkpoints save. The state consists of tensors that are sharded like the parameters.

use burn::tensor::{DType, Tensor};

use crate::data_parallel::{BucketShard, BucketStep, SteppedBucket};

/// The prefix of the keys under which checkpoints store first AdamW moments. The path of the weight follows the prefix.
pub const FIRST: &str = "adamw.first/";

/// The prefix of the keys under which checkpoints store second AdamW moments. The path of the weight follows the
/// prefix.
pub const SECOND: &str = "adamw.second/";

/// A kind of optimizer state, such as the first moment. It has one tensor per parameter.
pub struct StateKind {
    /// The prefix of the keys of the state tensors. The path of the parameter follows the prefix.
    pub prefix: String,
    /// The dtype of each state tensor, in the order of the parameter table. `None` if a parameter has no state tensor
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
