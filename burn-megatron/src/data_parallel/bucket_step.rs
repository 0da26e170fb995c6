//! The interface between a bucket and the optimizer or a checkpoint: this rank's shard of the bucket, and the optimizer
//! step of the bucket.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::layout::ParameterSlice;
use super::sharding_plan::ShardingPlan;
use crate::mesh::Grid;

/// The ranges of this rank's shard of a bucket, or of the complete bucket if the optimizer state is not sharded. They
/// do not change during training.
#[derive(Clone, Debug)]
pub struct BucketShard {
    /// The grid of ranks (dense or expert) over which the parameters of the bucket are replicated or sharded.
    pub grid: Grid,
    /// The range of the shard in the bucket, in elements, including padding.
    pub range: Range<usize>,
    /// The part of `range` that this rank saves in a checkpoint. Together, the ranks of a data-parallel group save each
    /// element once.
    pub partition: Range<usize>,
    /// The parameters in the shard. The gaps between them are padding.
    pub slices: Vec<ParameterSlice>,
    /// The dtype of the master weights and of the gradients.
    pub dtype: DType,
    /// The device of the master weights and the moments: the device of the model, or the host.
    pub device: Device,
}

impl BucketShard {
    /// Returns the shard of each bucket.
    pub(super) fn all(plan: &ShardingPlan) -> Vec<Self> {
        let shard = |bucket| {
            let (_, dtype) = plan.model_and_main_dtypes(bucket);
            Self {
                grid: plan.grid(bucket),
                range: plan.shard_range(bucket),
                partition: plan.groups(bucket).partition_range(plan.elements(bucket)),
                slices: plan.shard_slices(bucket),
                dtype,
                device: plan.state_device(bucket),
            }
        };
        (0..plan.buckets()).map(shard).collect()
    }

    /// Returns the ranges of each bucket for [`write_items`](super::layout::write_items): the range that this
    /// rank optimizes, and the range within it that this rank writes.
    pub fn ranges<'a>(
        shards: impl Iterator<Item = &'a Self>,
    ) -> impl Fn(usize) -> (Range<usize>, Range<usize>) {
        let range = |shard: &Self| (shard.range.clone(), shard.partition.clone());
        let ranges: Vec<_> = shards.map(range).collect();
        move |bucket| ranges[bucket].clone()
    }
}

/// A function that runs the optimizer step of a bucket. The second argument is the outcome of the step, or `None` if
/// it is already certain that the step is taken. See [`step_outcome`](burn_megatron_kernels::adamw::step_outcome). For an offloaded bucket, all tensors and the outcome
/// are on the host, and a host thread calls the function.
pub type StepFn = dyn Fn(BucketStep, Option<&Tensor<1>>) -> SteppedBucket + Send + Sync;

/// The input of the optimizer step of one bucket.
pub struct BucketStep {
    /// The number of the bucket.
    pub number: usize,
    /// The master weights of the shard, `[elements]`. An in-place operation copies the tensor first if a snapshot also
    /// references it.
    pub master: Tensor<1>,
    /// The gradients of the shard, `[elements]`, as sums over all tokens. Multiply the sums by
    /// [`Gradients::factor`](super::Gradients::factor) to get the gradients.
    pub gradient: Tensor<1>,
    /// An output tensor `[elements]` for the updated parameters in the dtype of the model. Its current elements are the
    /// parameters of the last step, unless those parameters are still in use. `None` if the model computes with the
    /// master weights.
    pub model: Option<Tensor<1>>,
}

/// The result of the optimizer step of one bucket.
pub struct SteppedBucket {
    /// The updated master weights.
    pub master: Tensor<1>,
    /// The updated parameters in the dtype of the model, if the optimizer has computed them. Otherwise the master
    /// weights are cast.
    pub model: Option<Tensor<1>>,
}

/// A function that changes each bucket after the optimizer step, before the bucket is gathered. Its first argument is
/// the number of the bucket. For an offloaded bucket the function runs in a host thread.
#[derive(Clone)]
pub struct AfterStep(pub Arc<ChangeFn>);

type ChangeFn = dyn Fn(usize, SteppedBucket) -> SteppedBucket + Send + Sync;

impl fmt::Debug for AfterStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a change of the masters")
    }
}
