//! The interface of a bucket for the optimizer and the checkpoint: this rank's shard and its step.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::layout::ParameterSlice;
use super::sharding_plan::ShardingPlan;
use crate::mesh::Grid;

/// This rank's shard of a bucket, or the complete bucket if the optimizer is not sharded. It is constant during
/// training.
#[derive(Clone, Debug)]
pub struct BucketShard {
    /// The grid of its parameters.
    pub grid: Grid,
    /// The elements of the shard in the bucket, including padding.
    pub range: Range<usize>,
    /// The elements in `range` that this rank saves, so that its data-parallel group saves each element once.
    pub partition: Range<usize>,
    /// The parameters in the shard. The gaps between them are padding.
    pub slices: Vec<ParameterSlice>,
    /// The dtype of the masters and of the gradients.
    pub dtype: DType,
    /// The device of the masters and the moments: the device of the model, or the host.
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

/// Steps a bucket. The second argument is the outcome of the step, or `None` without an outcome: see
/// [`step_outcome`](burn_megatron_kernels::adamw::step_outcome). For an offloaded bucket, all tensors and the outcome
/// are on the host, and a host thread calls the function.
pub type StepFn = dyn Fn(BucketStep, Option<&Tensor<1>>) -> SteppedBucket + Send + Sync;

/// One bucket in a step of the optimizer.
pub struct BucketStep {
    /// The number of the bucket.
    pub number: usize,
    /// The masters of the shard, `[elements]`. An in-place operation copies them only if a snapshot also holds
    /// them.
    pub master: Tensor<1>,
    /// The gradients of the shard, `[elements]`, as sums. Multiply them by
    /// [`Gradients::factor`](super::Gradients::factor).
    pub gradient: Tensor<1>,
    /// A tensor `[elements]` in the dtype of the model for the new copy. It is the copy of the last step,
    /// unless it is still in use. `None` if the model computes with the masters.
    pub model: Option<Tensor<1>>,
}

/// A bucket after the optimizer's step.
pub struct SteppedBucket {
    /// The new masters.
    pub master: Tensor<1>,
    /// The new parameters in the dtype of the model, if the optimizer has computed them. Otherwise the masters
    /// are cast.
    pub model: Option<Tensor<1>>,
}

/// A change to each bucket after the optimizer step, before the bucket is gathered. Its first argument is the
/// number of the bucket. For an offloaded bucket it runs in a host thread.
#[derive(Clone)]
pub struct AfterStep(pub Arc<ChangeFn>);

type ChangeFn = dyn Fn(usize, SteppedBucket) -> SteppedBucket + Send + Sync;

impl fmt::Debug for AfterStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a change of the masters")
    }
}
