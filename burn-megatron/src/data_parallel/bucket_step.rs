//! A bucket as the optimizer and the checkpoint see it: this rank's shard, and its step.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};

use super::layout::ParameterSlice;
use super::sharding_plan::ShardingPlan;
use crate::mesh::Grid;

/// This rank's shard of a bucket: all of it, where the optimizer is not sharded. Constant during training.
#[derive(Clone, Debug)]
pub struct BucketShard {
    /// The grid of its parameters.
    pub grid: Grid,
    /// Its elements in the bucket, padding included.
    pub range: Range<usize>,
    /// The elements in `range` that this rank saves, so that its data-parallel group saves each element once.
    pub partition: Range<usize>,
    /// The parameters in the shard; what lies between them is padding.
    pub slices: Vec<ParameterSlice>,
    /// The dtype of the masters and of the gradients.
    pub dtype: DType,
    /// Where the masters and the moments are: the device, or the host.
    pub device: Device,
}

impl BucketShard {
    /// The shard of each bucket.
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

    /// By bucket, the range that a rank optimizes and, in it, the range that it writes: for
    /// [`write_items`](super::layout::write_items).
    pub fn ranges<'a>(
        shards: impl Iterator<Item = &'a Self>,
    ) -> impl Fn(usize) -> (Range<usize>, Range<usize>) {
        let range = |shard: &Self| (shard.range.clone(), shard.partition.clone());
        let ranges: Vec<_> = shards.map(range).collect();
        move |bucket| ranges[bucket].clone()
    }
}

/// Steps a bucket. The second argument is the outcome of the step, see
/// [`step_outcome`](burn_megatron_kernels::adamw::step_outcome), if there is one. All tensors of an offloaded bucket,
/// and its outcome, are on the host, and a thread of the host calls it.
pub type StepFn = dyn Fn(BucketStep, Option<&Tensor<1>>) -> SteppedBucket + Send + Sync;

/// One bucket in a step of the optimizer.
pub struct BucketStep {
    /// The number of the bucket.
    pub number: usize,
    /// The masters of the shard, `[elements]`: an operation in place copies them only if a snapshot holds them.
    pub master: Tensor<1>,
    /// The gradients of the shard, `[elements]`, as sums; multiply by [`Gradients::factor`](super::Gradients::factor).
    pub gradient: Tensor<1>,
    /// A tensor `[elements]` in the dtype of the model for the new copy: that of the last step, unless something
    /// else holds it. `None` where the model computes with the masters.
    pub model: Option<Tensor<1>>,
}

/// A bucket after the optimizer's step.
pub struct SteppedBucket {
    /// The new masters.
    pub master: Tensor<1>,
    /// The same in the dtype of the model, if the optimizer has computed it; it is cast otherwise.
    pub model: Option<Tensor<1>>,
}

/// A change to a bucket, by its number, after the optimizer and before it is gathered; for an offloaded bucket it runs
/// on the host, in a thread of the host.
#[derive(Clone)]
pub struct AfterStep(pub Arc<ChangeFn>);

type ChangeFn = dyn Fn(usize, SteppedBucket) -> SteppedBucket + Send + Sync;

impl fmt::Debug for AfterStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a change of the masters")
    }
}
