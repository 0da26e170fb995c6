//! Counts the parameter uses and gradients of micro-batches that replay a CUDA graph, because their host code does not
//! run.

use burn_megatron_kernels::cuda_graph::memory_id;

use super::super::gradient_tracker::GradientTracker;
use super::GradientBuckets;

/// The number of uses and the number of accumulated gradients of each parameter in one micro-batch.
#[derive(Clone, Debug)]
pub struct MicroBatchUses(Vec<(usize, usize)>);

/// A snapshot of the counts of the buckets.
pub(crate) struct Counted {
    tracker: GradientTracker,
    /// The accumulated gradients of each bucket.
    accumulated: Vec<Vec<usize>>,
}

impl GradientBuckets {
    /// Assigns every bucket its static buffer, which no reduction reads or takes until
    /// [`release`](Self::release).
    pub fn hold(&mut self) {
        self.wait_until_remaining(0);
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            let buffer = bucket.take_buffer(number, &self.plan);
            bucket.buffer = Some(buffer);
        }
        self.held = true;
    }

    /// Starts the reductions that are ready.
    pub fn release(&mut self) {
        self.held = false;
        self.advance();
    }

    /// Returns the counts so far.
    pub fn counted(&self) -> Counted {
        let accumulated = self.buckets.iter().map(|bucket| bucket.accumulated.clone());
        Counted {
            tracker: self.tracker.clone(),
            accumulated: accumulated.collect(),
        }
    }

    /// Returns the counts of the one micro-batch since `before`, and resets the counts to `before`. The micro-batch was
    /// captured and did not run.
    pub fn take_back(&mut self, before: Counted) -> MicroBatchUses {
        let plan = &self.plan;
        let of = |index: usize| {
            let (number, _) = plan.location(index);
            let at = plan.position(number, index);
            let gradients = self.buckets[number].accumulated[at] - before.accumulated[number][at];
            (self.tracker.uses_in_forward(index), gradients)
        };
        let uses = (0..plan.parameters.len()).map(of).collect();
        self.tracker = before.tracker;
        for (bucket, accumulated) in self.buckets.iter_mut().zip(before.accumulated) {
            bucket.accumulated = accumulated;
        }
        MicroBatchUses(uses)
    }

    /// Counts a micro-batch. Call it after the forward of the micro-batch has begun.
    pub fn count(&mut self, uses: &MicroBatchUses) {
        let plan = &self.plan;
        for (index, (expected, gradients)) in uses.0.iter().enumerate() {
            (0..*expected).for_each(|_| self.tracker.expect(index));
            let (number, _) = plan.location(index);
            self.buckets[number].accumulated[plan.position(number, index)] += gradients;
            (0..*gradients).for_each(|_| self.tracker.complete(index));
        }
    }

    /// Returns the memory identifiers of the buffers.
    pub fn memory_ids(&self) -> Vec<Option<usize>> {
        let buffers = self.buckets.iter().map(|bucket| bucket.buffer.as_ref());
        let ids = buffers.map(|buffer| memory_id(&buffer?.tensor));
        ids.collect()
    }
}
