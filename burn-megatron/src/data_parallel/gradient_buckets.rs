//! The gradient buckets of one rank, from accumulation to reduction.
//!
//! Each bucket is a flat buffer in which the gradients of its parameters are accumulated. Its reduction over the ranks
//! starts when the last expected gradient was accumulated, while the backward continues. With ZeRO-2 and ZeRO-3, each
//! bucket is reduced after each micro-batch. Its buffer is then freed, and only the reduced shard of this rank is kept.
//!
//! Reductions start in the order of the buckets, regardless of the order of the gradients. Ranks that use their
//! parameters differently, or run no micro-batch, still call the same collectives.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use burn_megatron_kernels::flat::{self, Ranges};
use burn_megatron_kernels::gradient::{FlatGradients, Place};

use super::error::DataParallelError;
use super::gradient_check::GradientCheck;
use super::gradient_tracker::GradientTracker;
use super::memory_usage::{MemoryCategory, TrackedAllocation, TrackedTensor};
use super::prefetch_order::extend_fingerprint;
use super::reduction::{PendingReduction, has_several_collectives, start_reductions};
use super::sharding_plan::ShardingPlan;
use crate::fingerprint;
use crate::mesh::ZeroStage;

mod micro_batch_uses;

pub use micro_batch_uses::MicroBatchUses;

pub(super) struct GradientBuckets {
    plan: Arc<ShardingPlan>,
    /// The check of the gradients before their reduction, if enabled.
    pub check: Option<Arc<GradientCheck>>,
    pub tracker: GradientTracker,
    buckets: Vec<GradientBucket>,
    in_flight: VecDeque<(usize, PendingReduction)>,
    /// A hash of the buckets that were reduced in this step, to compare the ranks.
    fingerprint: u64,
    /// The measurement of this step by the check of the gradients.
    measured: Option<Tensor<1>>,
    warned: BTreeSet<usize>,
    /// Whether reductions are held back.
    held: bool,
}

#[derive(Default)]
struct GradientBucket {
    buffer: Option<TrackedTensor>,
    /// The static buffer and its content since the last reduction started: see [static
    /// buffers](super::DataParallelConfig::static_buffers).
    static_buffer: Option<Tensor<1>>,
    /// The range of all elements, once the buffer has been cleared.
    all: Option<Ranges>,
    /// The number of gradients of each parameter that were accumulated since the last reduction started.
    accumulated: Vec<usize>,
    /// The number of reductions started in this step.
    reductions: usize,
    /// The sum of the finished reductions.
    reduced: Option<TrackedTensor>,
}

/// This rank's reduced gradients of a step.
pub(super) struct ReducedGradients {
    /// This rank's shard of each bucket, summed over the data axis.
    pub shards: Vec<TrackedTensor>,
    pub fingerprint: u64,
    /// The measurements of the gradient check: see [`GradientCheck`].
    pub measured: Option<Tensor<1>>,
}

impl GradientBuckets {
    pub fn new(plan: &Arc<ShardingPlan>, check: Option<Arc<GradientCheck>>) -> Self {
        let bucket = |number| GradientBucket {
            accumulated: vec![0; plan.layout.bucket(number).parameters.len()],
            ..GradientBucket::default()
        };
        Self {
            plan: plan.clone(),
            check,
            tracker: GradientTracker::new(plan.parameters.len()),
            buckets: (0..plan.buckets()).map(bucket).collect(),
            in_flight: VecDeque::new(),
            fingerprint: 0,
            measured: None,
            warned: BTreeSet::new(),
            held: false,
        }
    }

    /// Records that no further forward of `stage` follows in this step. `None`: no further forward of any stage
    /// follows.
    pub fn end_forwards(&mut self, stage: Option<usize>) {
        self.tracker.end_forwards(stage);
        self.advance();
    }

    /// Takes the buffer of the bucket that contains these parameters, to accumulate a gradient of each
    /// parameter. Call [`put_buffer`](Self::put_buffer) afterwards. Returns `None` after the end of the step.
    pub fn take_buffer(
        &mut self,
        parameters: &[usize],
    ) -> Option<(FlatGradients, TrackedAllocation)> {
        let plan = &self.plan;
        let is_late = |index: &&usize| !self.tracker.is_pending(**index);
        if let Some(index) = parameters.iter().find(is_late) {
            tracing::warn!(
                parameter = plan.parameters[*index].path,
                "gradient received after the end of its step; ignored"
            );
            return None;
        }
        let (number, _) = plan.location(parameters[0]);
        let bucket = &mut self.buckets[number];
        let place = |index: &usize| Place {
            offset: plan.location(*index).1.start,
            // A static buffer is initialized with zeros.
            add: plan.config.static_buffers
                || bucket.accumulated[plan.position(number, *index)] > 0,
        };
        let places = parameters.iter().map(place).collect();
        let TrackedTensor { tensor, allocation } = bucket.take_buffer(number, plan);
        let flat = tensor;
        Some((FlatGradients { flat, places }, allocation))
    }

    /// Puts back the buffer, to which one gradient of each of these parameters was added. Starts the reductions that
    /// are ready.
    pub fn put_buffer(&mut self, parameters: &[usize], buffer: TrackedTensor) {
        let plan = &self.plan;
        let (number, _) = plan.location(parameters[0]);
        let bucket = &mut self.buckets[number];
        bucket.buffer = Some(buffer);
        for index in parameters {
            bucket.accumulated[plan.position(number, *index)] += 1;
            self.tracker.complete(*index);
        }
        self.advance();
    }

    /// Ends the step: starts the remaining reductions, and waits for all reductions.
    ///
    /// A parameter that the step did not use has a zero gradient. A warning that names the parameter is logged once.
    pub fn finish(&mut self) -> Result<ReducedGradients, DataParallelError> {
        let plan = &self.plan.clone();
        let next = Self::new(plan, self.check.clone());
        let mut finished = std::mem::replace(self, next);
        self.warned = std::mem::take(&mut finished.warned);
        finished.held = false;
        if let Some((index, uses)) = finished.tracker.missing_backward() {
            let path = plan.parameters[index].path.clone();
            return Err(DataParallelError::NoBackward { path, uses });
        }
        let stage = plan.stage();
        match finished.tracker.micro_batches() {
            0 if stage >= ZeroStage::Gradients && plan.reduces_over_ranks() => {
                return Err(DataParallelError::NoMicroBatches { stage });
            }
            0 => {}
            _ => finished.warn_of_unused(&mut self.warned),
        }
        finished.start_remaining();
        finished.wait_all();
        for (next, bucket) in self.buckets.iter_mut().zip(&mut finished.buckets) {
            next.static_buffer = bucket.static_buffer.take();
            next.all = bucket.all.take();
        }
        let numbered = finished.buckets.into_iter().enumerate();
        let shards = numbered.map(|(number, bucket)| match bucket.reduced {
            Some(shard) => shard,
            None => unreachable!("bucket {number} was reduced"),
        });
        Ok(ReducedGradients {
            shards: shards.collect(),
            fingerprint: finished.fingerprint,
            measured: finished.measured,
        })
    }

    /// Starts the reductions that are ready.
    fn advance(&mut self) {
        if self.held {
            return;
        }
        let overlaps = self.plan.config.overlap_grad_reduce;
        if !overlaps && self.plan.stage() < ZeroStage::Gradients {
            return;
        }
        while let Some(ready) = self.next_ready() {
            self.start(ready);
            if !overlaps {
                self.wait_until_remaining(0);
            }
        }
    }

    /// Returns the next buckets in order whose gradients are complete.
    fn next_ready(&self) -> Option<Range<usize>> {
        let plan = &self.plan;
        if self.buckets.is_empty() {
            // The rank has no parameters, as in an empty stage of a pipeline.
            return None;
        }
        let reductions = |number: usize| self.buckets[number].reductions;
        // The first bucket that is a round behind the previous bucket, or otherwise the first bucket.
        let behind =
            (1..plan.buckets()).find(|number| reductions(*number) < reductions(number - 1));
        let first = behind.unwrap_or(0);
        let sharded = plan.stage() >= ZeroStage::Gradients;
        let is_ready = |number: &usize| {
            if sharded {
                self.is_full(*number)
            } else {
                reductions(*number) == 0 && self.is_final(*number)
            }
        };
        let round = reductions(first);
        let ready = (first..plan.buckets())
            .take_while(|number| reductions(*number) == round && is_ready(number))
            .count();
        (ready > 0).then(|| first..first + ready)
    }

    /// Whether no further gradient of this bucket is expected.
    fn is_final(&self, number: usize) -> bool {
        let mut parameters = self.plan.layout.bucket(number).parameters.iter();
        parameters.all(|parameter| self.tracker.is_final(parameter.index))
    }

    /// Whether every parameter of this bucket has the gradients of a micro-batch.
    fn is_full(&self, number: usize) -> bool {
        let accumulated = &self.buckets[number].accumulated;
        let parameters = self.plan.layout.bucket(number).parameters.iter();
        accumulated.iter().any(|count| *count > 0)
            && parameters.zip(accumulated).all(|(parameter, count)| {
                *count >= self.tracker.uses_per_forward(parameter.index).max(1)
            })
    }

    /// Starts the reductions of some buckets in one call. Reductions that consist of several collectives are
    /// started one after the other. Then the order of the collectives of all groups does not depend on the
    /// buckets that are ready on a rank.
    fn start(&mut self, numbers: Range<usize>) {
        let plan = &self.plan.clone();
        let several = |number| has_several_collectives(number, plan);
        if numbers.len() > 1 && numbers.clone().any(several) {
            for number in numbers {
                self.start(number..number + 1);
            }
            return;
        }
        if plan.stage() >= ZeroStage::Gradients {
            // One bucket is in flight while the next bucket and this rank's shard of the previous bucket are
            // filled.
            self.advance_reductions(true);
        }
        let buffers: Vec<_> = numbers
            .clone()
            .map(|number| {
                let buffer = self.buckets[number].take_zero_filled(number, plan);
                if plan.config.static_buffers {
                    self.buckets[number].static_buffer = Some(buffer.tensor.clone());
                }
                record_gradients(number, &buffer.tensor, plan);
                if let Some(check) = &self.check {
                    let gradients = buffer.tensor.clone();
                    self.measured = Some(check.measure(number, gradients, self.measured.take()));
                }
                extend_fingerprint(&mut self.fingerprint, number);
                self.buckets[number].reductions += 1;
                buffer
            })
            .collect();
        self.in_flight.extend(numbers.clone().zip(start_reductions(
            numbers.clone(),
            buffers,
            plan,
        )));
        if plan.stage() < ZeroStage::Gradients {
            let started = self
                .in_flight
                .split_off(self.in_flight.len() - numbers.len());
            self.advance_reductions(false);
            self.in_flight.extend(started);
        }
    }

    /// Starts the next collective of each reduction that consists of several collectives and whose first collective is
    /// in flight. If `finishes` is true, it also waits for the other reductions.
    fn advance_reductions(&mut self, finishes: bool) {
        let plan = &self.plan;
        for (number, reduction) in std::mem::take(&mut self.in_flight) {
            if reduction.is_first_of_several(plan) {
                let category = self.buckets[number].category();
                let advanced = reduction.advanced(category, plan);
                self.in_flight.push_back((number, advanced));
            } else if finishes {
                self.buckets[number].finish_reduction(reduction, plan);
            } else {
                self.in_flight.push_back((number, reduction));
            }
        }
    }

    /// Starts the remaining reductions: one per bucket, or with ZeRO-2 and ZeRO-3 one per bucket and micro-batch.
    fn start_remaining(&mut self) {
        let rounds = if self.plan.stage() >= ZeroStage::Gradients {
            self.tracker.micro_batches().max(1)
        } else {
            1
        };
        for round in 0..rounds {
            self.start_round(round);
        }
        let has_gradients =
            |bucket: &GradientBucket| bucket.accumulated.iter().any(|count| *count > 0);
        if self.buckets.iter().any(has_gradients) {
            let most = self.buckets.iter().map(|bucket| bucket.reductions).max();
            self.start_round(most.unwrap_or(0));
        }
    }

    fn start_round(&mut self, round: usize) {
        for number in 0..self.buckets.len() {
            if self.buckets[number].reductions <= round {
                self.start(number..number + 1);
            }
        }
    }

    /// Waits for the oldest reductions until at most `remaining` are in flight.
    fn wait_until_remaining(&mut self, remaining: usize) {
        while self.in_flight.len() > remaining {
            if let Some((number, reduction)) = self.in_flight.pop_front() {
                self.buckets[number].finish_reduction(reduction, &self.plan);
            }
        }
    }

    /// Waits for all reductions. Without sharding, each rank waits for a different reduction first. This shares
    /// the work with engines whose waiting rank computes the sum.
    fn wait_all(&mut self) {
        // The ranks start collectives in the same order. All collectives between nodes are started before the
        // first wait.
        self.advance_reductions(false);
        for (number, reduction) in std::mem::take(&mut self.in_flight) {
            let category = self.buckets[number].category();
            let advanced = reduction.advanced(category, &self.plan);
            self.in_flight.push_back((number, advanced));
        }
        let groups = &self.plan.dense;
        if groups.shard.size() == 1 && !self.in_flight.is_empty() {
            let first = groups.data.rank() * self.in_flight.len() / groups.data.size();
            self.in_flight.rotate_left(first);
        }
        self.wait_until_remaining(0);
    }

    fn warn_of_unused(&self, warned: &mut BTreeSet<usize>) {
        for (index, parameter) in self.plan.parameters.iter().enumerate() {
            if !self.tracker.has_gradient(index) && warned.insert(index) {
                tracing::warn!(
                    parameter = parameter.path,
                    "no gradient received: the loss does not depend on it; its gradient is zero"
                );
            }
        }
    }
}

/// Records fingerprints of the gradients in a bucket, if fingerprints are recorded.
fn record_gradients(number: usize, buffer: &Tensor<1>, plan: &ShardingPlan) {
    let Some(recorder) = fingerprint::recording() else {
        return;
    };
    for parameter in &plan.layout.bucket(number).parameters {
        let gradient = buffer.clone().slice([parameter.range.clone()]);
        recorder.gradient(&plan.parameters[parameter.index].path, gradient);
    }
}

impl GradientBucket {
    /// Takes the buffer, which is allocated if needed. The gradient of a parameter is uninitialized if nothing
    /// was accumulated. Padding is 0.
    fn take_buffer(&mut self, number: usize, plan: &ShardingPlan) -> TrackedTensor {
        self.buffer.take().unwrap_or_else(|| {
            let (_, main) = plan.model_and_main_dtypes(number);
            let elements = plan.elements(number);
            if plan.config.static_buffers {
                let buffer = match self.static_buffer.take() {
                    Some(buffer) => {
                        let all = 0..elements;
                        let new = || Ranges::new([all], &plan.device);
                        flat::clear(buffer, self.all.get_or_insert_with(new))
                    }
                    None => Tensor::zeros([elements], (&plan.device, main)),
                };
                return plan.track(buffer, MemoryCategory::Gradients);
            }
            let category = if plan.stage() >= ZeroStage::Gradients {
                MemoryCategory::Buffers
            } else {
                MemoryCategory::Gradients
            };
            let buffer = plan.uninitialized(elements, main);
            plan.track(flat::clear(buffer, &plan.gaps[number]), category)
        })
    }

    /// Takes the buffer, with zeros for the parameters without accumulated gradients.
    fn take_zero_filled(&mut self, number: usize, plan: &ShardingPlan) -> TrackedTensor {
        let mut buffer = self.take_buffer(number, plan);
        let parameters = plan.layout.bucket(number).parameters.iter();
        let unused = parameters.zip(&self.accumulated);
        let unused = unused.filter(|(_, count)| **count == 0);
        let unused: Vec<_> = unused
            .map(|(parameter, _)| parameter.range.clone())
            .collect();
        self.accumulated.fill(0);
        if !unused.is_empty() && !plan.config.static_buffers {
            let ranges = Ranges::new(unused, &plan.device);
            buffer.tensor = flat::clear(buffer.tensor, &ranges);
        }
        buffer
    }

    /// Returns the memory category of a reduced shard. A shard that is accumulated onto an earlier shard is
    /// freed immediately.
    fn category(&self) -> MemoryCategory {
        match self.reduced {
            None => MemoryCategory::Gradients,
            Some(_) => MemoryCategory::Buffers,
        }
    }

    /// Waits for a reduction, and accumulates its result onto the results of earlier micro-batches.
    fn finish_reduction(&mut self, reduction: PendingReduction, plan: &ShardingPlan) {
        let shard = reduction.wait(self.category(), plan);
        self.reduced = Some(match self.reduced.take() {
            None => shard,
            Some(TrackedTensor { tensor, allocation }) => {
                let tensor = flat::accumulate(tensor, 0, shard.tensor.clone(), true);
                plan.recycle(shard.tensor);
                TrackedTensor { tensor, allocation }
            }
        });
    }
}
