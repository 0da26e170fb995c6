//! The interface between the buckets and the optimizer or a checkpoint: this rank's shard of each bucket.

use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{DType, Device, Tensor};

use super::DistributedDataParallel;
use crate::data_parallel::bucket_step::{
    AfterStep, BucketShard, BucketStep, StepFn, SteppedBucket,
};
use crate::data_parallel::gradients::Gradients;
use crate::data_parallel::memory_usage::TrackedTensor;
use crate::data_parallel::offload::host_stepper::HostBucket;
use crate::data_parallel::segments::ShardSegment;
use crate::data_parallel::sharding_groups::ShardingGroups;
use crate::mesh::Grid;

impl<M: Module> DistributedDataParallel<M> {
    /// Sets a function that changes the master weights after the next optimizer step.
    pub fn after_next_step(&mut self, change: AfterStep) {
        self.after_step = Some(change);
    }

    /// Returns the ranges of this rank's shard of each bucket.
    pub fn shards(&self) -> &[BucketShard] {
        &self.shards
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> &Device {
        &self.buffers.plan.device
    }

    /// Returns the dtype of the master weights of each parameter, in the order of the parameter [`table`](Self::table).
    pub fn master_dtypes(&self) -> impl Iterator<Item = DType> {
        let parameters = self.buffers.plan.parameters.iter();
        parameters.map(|parameter| parameter.main_dtype)
    }

    /// Returns the master weights of this rank's shard of a bucket. The master weights are in host memory if the bucket
    /// is offloaded.
    pub fn master_shard(&self, bucket: usize) -> Tensor<1> {
        self.buffers.master_shard(bucket)
    }

    /// Replaces the master weights of this rank's shard of a bucket, on this rank only. The parameters in the dtype of
    /// the model are not changed.
    pub fn change_master(&mut self, bucket: usize, change: impl FnOnce(Tensor<1>) -> Tensor<1>) {
        self.buffers.parameters().change_master(bucket, change);
    }

    /// Returns the index of each parameter, and the gathered value with which the model computes. Parameters whose
    /// value is part of this rank's master weights, and parameters that are still being gathered, are left out.
    pub fn model_copies(&self) -> impl Iterator<Item = (usize, Tensor<1>)> {
        let plan = &self.buffers.plan;
        (0..plan.buckets()).flat_map(move |number| {
            let copy = self.buffers.parameters().copy(number);
            let parameters = plan.layout.bucket(number).parameters.iter();
            copy.into_iter().flat_map(move |copy| {
                let part = |range: &Range<usize>| copy.clone().slice([range.clone()]);
                let parts = parameters.clone().map(|it| (it.index, part(&it.range)));
                parts.collect::<Vec<_>>()
            })
        })
    }

    /// Frees gathered parameters, as the end of a step does. This method has an effect only with ZeRO-3.
    pub fn reshard(&self) {
        self.buffers.parameters().reshard();
        if let Some(frozen) = &self.buffers.frozen {
            frozen.buckets().reshard();
        }
    }

    /// Returns the segments of the gradients that this rank counts. Each element of the model is counted by one rank.
    pub(crate) fn unique_segments(&self) -> &[ShardSegment] {
        &self.unique_segments
    }

    /// Returns the process groups over which the buckets of each grid are reduced and sharded.
    pub fn sharding_groups(&self) -> impl Iterator<Item = (Grid, &ShardingGroups)> {
        self.buffers.plan.all_groups()
    }

    /// Replaces the master weights of this rank's shards with the result of `step`. The host runs the steps of
    /// offloaded buckets while the device runs the steps of the other buckets. Each bucket on the device is gathered,
    /// and its gradient is freed, before the step of the next bucket. Collective: call on all ranks.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if an optimizer step on the host fails.
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
        let on_host = self.buffers.plan.offload.buckets;
        let mut offloaded: Vec<_> = gradients.into_sums().collect();
        let own = offloaded.split_off(on_host);
        if let Some(host) = &self.host {
            for (number, gradient) in offloaded.into_iter().enumerate().rev() {
                let (master, model) = self.buffers.parameters().take(number);
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
            for number in (0..on_host).rev() {
                let _span = tracing::trace_span!("wait_for_host", bucket = number).entered();
                let stepped = host.wait(number);
                self.buffers.parameters().put_from_host(number, stepped);
            }
        }
        self.finish_step();
    }

    /// Replaces the master weights of this rank's shards with the result of `step`, if no bucket is offloaded.
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

    /// Steps the last buckets, whose gradients are given.
    fn step_on_device(
        &self,
        gradients: Vec<TrackedTensor>,
        mut step: impl FnMut(BucketStep) -> SteppedBucket,
    ) {
        let plan = &self.buffers.plan;
        let first = plan.buckets() - gradients.len();
        // The last bucket contains the first layers, which the next forward needs first.
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
            self.buffers.parameters().step(number, step);
            drop(allocation);
            if let Some(host) = &self.host {
                host.timeline().device_step(number);
            }
        }
    }

    /// Replaces the master weights of this rank's shards and gathers the parameters, like an optimizer step.
    /// Collective: call on all ranks.
    pub fn replace_masters(&mut self, masters: Vec<Tensor<1>>) {
        self.buffers.parameters().replace(masters);
        self.finish_step();
    }

    /// Finishes a step that all ranks skip. FP8 weights are quantized again, because the scales may have changed. The
    /// FP8 weights then depend only on master weights and scales, as after a checkpoint is loaded.
    pub fn finish_skipped_step(&mut self) {
        if self.config().fp8_param_gather {
            self.finish_step();
        }
    }

    /// Finishes a step after all master weights have changed and the gradients are freed. Collective: call on all ranks
    /// of the stage.
    pub(super) fn finish_step(&mut self) {
        self.fp8.invalidate_weights();
        self.buffers.finish_gathers();
        let device = &self.buffers.plan.device;
        self.buffers.freed_memory.after_step(device);
    }
}
