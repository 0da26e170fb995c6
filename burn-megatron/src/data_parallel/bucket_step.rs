//! The view of the optimizer and the checkpoint on the buckets: this rank's shard of each.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use super::layout::ParameterSlice;
use super::memory_usage::TrackedTensor;
use super::offload::HostBucket;
use super::sharding_groups::ShardingGroups;
use super::sharding_plan::ShardingPlan;
use super::{DistributedDataParallel, Gradients, ShardSegment};
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
    /// The gradients of the shard, `[elements]`, as sums; multiply by [`Gradients::factor`].
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

impl<M: Module> DistributedDataParallel<M> {
    /// Changes the masters of the next step of the optimizer.
    pub fn after_next_step(&mut self, change: AfterStep) {
        self.after_step = Some(change);
    }

    /// This rank's shard of each bucket.
    pub fn shards(&self) -> &[BucketShard] {
        &self.shards
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.buffers.plan.device
    }

    /// The dtype of the master of each parameter, in the order of the table.
    pub fn master_dtypes(&self) -> impl Iterator<Item = DType> {
        let parameters = self.buffers.plan.parameters.iter();
        parameters.map(|parameter| parameter.main_dtype)
    }

    /// The masters of this rank's shard of a bucket; on the host, if it is offloaded.
    pub fn master_shard(&self, bucket: usize) -> Tensor<1> {
        self.buffers.master_shard(bucket)
    }

    /// Replaces the masters of this rank's shard of a bucket, on this rank only and without its copy in another type.
    pub fn change_master(&mut self, bucket: usize, change: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        let plan = &self.buffers.plan;
        self.buffers
            .parameters()
            .change_master(bucket, change, plan);
    }

    /// By the index of a parameter, the gathered copy that the model computes with, where it is not a part of the masters of
    /// this rank and no gather is in flight.
    pub fn model_copies(&self) -> impl Iterator<Item = (usize, Tensor<1>)> {
        let plan = &self.buffers.plan;
        (0..plan.buckets()).flat_map(move |number| {
            let copy = self.buffers.parameters().copy(number, plan);
            let parameters = plan.layout.bucket(number).parameters.iter();
            copy.into_iter().flat_map(move |copy| {
                let part = |range: &Range<usize>| copy.clone().slice([range.clone()]);
                let parts = parameters.clone().map(|it| (it.index, part(&it.range)));
                parts.collect::<Vec<_>>()
            })
        })
    }

    /// Frees gathered parameters, as at the end of a step; with ZeRO-3 only.
    pub fn reshard(&self) {
        self.buffers.parameters().reshard(&self.buffers.plan);
        if let Some(frozen) = &self.buffers.frozen {
            frozen.reshard();
        }
    }

    /// The segments of the gradients that this rank accounts for, so that each element counts once.
    pub(crate) fn unique_segments(&self) -> &[ShardSegment] {
        &self.unique_segments
    }

    /// The groups over which the buckets of each grid are reduced and sharded.
    pub fn sharding_groups(&self) -> impl Iterator<Item = (Grid, &ShardingGroups)> {
        self.buffers.plan.all_groups()
    }

    /// Replaces the masters of this rank's shards by what `step` makes of them and of the gradients: the host those of
    /// offloaded buckets, while the device steps the others. Each bucket of the device is gathered, and its gradient
    /// freed, before the next one is stepped. Collective: call on all ranks.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) if a step on the host fails.
    pub(crate) fn step_buckets(
        &mut self,
        gradients: Gradients,
        outcome: Option<&Tensor<1>>,
        step: &Arc<StepFn>,
    ) {
        let step = &match self.after_step.take() {
            None => step.clone(),
            Some(AfterStep(change)) => {
                let step = step.clone();
                let changed = move |bucket: BucketStep, outcome: Option<&Tensor<1>>| {
                    change(bucket.number, step(bucket, outcome))
                };
                Arc::new(changed) as Arc<StepFn>
            }
        };
        let plan = &self.buffers.plan;
        let mut offloaded: Vec<_> = gradients.into_sums().collect();
        let own = offloaded.split_off(plan.offload.buckets);
        if let Some(host) = &self.host {
            for (number, gradient) in offloaded.into_iter().enumerate().rev() {
                let (master, model) = self.buffers.parameters().take(number, plan);
                let bucket = HostBucket {
                    number,
                    gradient,
                    master,
                    model,
                };
                host.begin(bucket, step, outcome);
            }
        }
        self.step_on_device(own, |bucket| step(bucket, outcome));
        if let Some(host) = &self.host {
            for number in (0..plan.offload.buckets).rev() {
                let _span = tracing::trace_span!("wait_for_host", bucket = number).entered();
                let stepped = host.wait(number);
                let mut parameters = self.buffers.parameters();
                parameters.put_from_host(number, stepped, plan);
            }
        }
        self.finish_step();
    }

    /// The same where no bucket is offloaded.
    pub(crate) fn step_device_buckets(
        &mut self,
        gradients: Gradients,
        mut step: impl FnMut(BucketStep) -> SteppedBucket,
    ) {
        let change = self.after_step.take();
        self.step_on_device(gradients.into_sums().collect(), |bucket| {
            let number = bucket.number;
            let stepped = step(bucket);
            match &change {
                Some(AfterStep(change)) => change(number, stepped),
                None => stepped,
            }
        });
        self.finish_step();
    }

    /// Steps the last buckets, which have these gradients.
    fn step_on_device(
        &self,
        gradients: Vec<TrackedTensor>,
        mut step: impl FnMut(BucketStep) -> SteppedBucket,
    ) {
        let plan = &self.buffers.plan;
        let first = plan.buckets() - gradients.len();
        // The last bucket has the first layers, which the next forward needs first.
        for (index, gradient) in gradients.into_iter().enumerate().rev() {
            let number = first + index;
            let TrackedTensor { tensor, allocation } = gradient;
            let _span = tracing::trace_span!("update", bucket = number).entered();
            let step = |master, model| {
                let gradient = tensor.clone();
                let stepped = step(BucketStep {
                    number,
                    master,
                    gradient,
                    model,
                });
                plan.recycle(tensor);
                stepped
            };
            self.buffers.parameters().step(number, step, plan);
            drop(allocation);
            if let Some(host) = &self.host {
                host.timeline().device_step(number);
            }
        }
    }

    /// Replaces the masters of this rank's shards, as a step does. Collective: call on all ranks.
    pub fn replace_masters(&mut self, masters: Vec<Tensor<1>>) {
        for (number, master) in masters.into_iter().enumerate().rev() {
            let model = None;
            let step = |_, _| SteppedBucket { master, model };
            let plan = &self.buffers.plan;
            self.buffers.parameters().step(number, step, plan);
        }
        self.finish_step();
    }

    /// Call instead of a step that all ranks skip. FP8 weights are quantised again, as the scales may have
    /// changed: they depend on masters and scales only, as after loading a checkpoint.
    pub fn finish_skipped_step(&mut self) {
        if self.config().fp8_param_gather {
            self.finish_step();
        }
    }

    /// Call after all masters have changed and the gradients are freed. Collective: call on all ranks of the
    /// stage.
    pub(super) fn finish_step(&mut self) {
        self.fp8.invalidate_weights();
        self.buffers.finish_gathers();
        let device = &self.buffers.plan.device;
        self.buffers.freed_memory.after_step(device);
    }
}
