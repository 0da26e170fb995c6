//! Reads samples for a rank ahead of the steps.

use std::ops::Range;
use std::sync::Arc;

use super::BatchPlan;
use burn_megatron_data::{Batch, DataError, Prefetcher, Sample, Samples};

impl BatchPlan {
    /// Reads the micro-batches of `steps` in a background thread, up to two steps ahead. `before` is the number of
    /// samples before `steps`.
    pub(crate) fn read_ahead(
        &self,
        samples: Arc<dyn Samples>,
        steps: Range<usize>,
        before: u64,
    ) -> Result<Prefetcher, DataError> {
        let ready = match self.splits_steps() {
            true => 2,
            false => 2 * self.micro_batches(steps.end),
        };
        let rows = RankSamples {
            samples,
            plan: self.clone(),
            next: (steps.start, before),
        };
        Prefetcher::new(Arc::new(rows), self.own_numbers(steps, before), ready)
    }
}

/// Samples that are returned as the batches of a rank.
struct RankSamples {
    samples: Arc<dyn Samples>,
    plan: BatchPlan,
    /// The next step and its first sample.
    next: (usize, u64),
}

impl Samples for RankSamples {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number)
    }

    fn batch(&self, numbers: Range<u64>) -> Result<Batch, DataError> {
        self.plan.rows_of(self.next, numbers, &*self.samples)
    }
}
