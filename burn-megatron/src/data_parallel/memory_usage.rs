//! Measures the memory that a rank has allocated for training state, as current and peak bytes by category.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::memory::MemoryPlan;

/// The category of a memory allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryCategory {
    /// Parameters, or the shards of parameters that a rank stores.
    Parameters,
    /// Gradients that are kept between micro-batches, and gathered values that reuse the memory of gradients.
    Gradients,
    /// Master weights and moments.
    Optimizer,
    /// Temporary buffers of a collective or an FSDP unit.
    Buffers,
    /// Master weights and moments in host memory.
    HostOptimizer,
}

/// The index of the counter of unsharded units, after the counters of the categories.
const UNITS: usize = 5;

/// The memory usage of one rank: the allocated bytes by category, and the number of unsharded FSDP units.
#[derive(Clone, Debug, Default)]
pub struct MemoryUsage(Arc<[PeakCounter; 6]>);

#[derive(Debug, Default)]
struct PeakCounter {
    now: AtomicU64,
    peak: AtomicU64,
}

/// A tracked allocation: its bytes are counted until this value is dropped.
#[derive(Debug)]
pub struct TrackedAllocation {
    usage: MemoryUsage,
    counter: usize,
    amount: u64,
}

impl MemoryUsage {
    /// Counts an allocation of `bytes` bytes until the returned value is dropped.
    pub fn track(&self, category: MemoryCategory, bytes: usize) -> TrackedAllocation {
        self.count(category as usize, bytes as u64)
    }

    /// Counts one unsharded FSDP unit until the returned value is dropped.
    pub fn track_unit(&self) -> TrackedAllocation {
        self.count(UNITS, 1)
    }

    /// Returns the maximum number of FSDP units that were unsharded or being gathered at the same time.
    pub fn peak_unsharded_units(&self) -> u64 {
        self.0[UNITS].peak.load(Ordering::Relaxed)
    }

    fn count(&self, counter: usize, amount: u64) -> TrackedAllocation {
        let PeakCounter { now, peak } = &self.0[counter];
        let sum = now.fetch_add(amount, Ordering::Relaxed) + amount;
        peak.fetch_max(sum, Ordering::Relaxed);
        TrackedAllocation {
            usage: self.clone(),
            counter,
            amount,
        }
    }

    /// Counts the bytes of a tensor until the returned value is dropped.
    pub fn track_tensor(&self, category: MemoryCategory, tensor: &Tensor<1>) -> TrackedAllocation {
        self.track(category, tensor.dims()[0] * tensor.dtype().size())
    }

    /// Returns the peak memory of each category. The categories may have reached their peaks at different times.
    pub fn peak(&self) -> MemoryPlan {
        self.read(|counter| &counter.peak)
    }

    /// Returns the currently allocated memory.
    pub fn now(&self) -> MemoryPlan {
        self.read(|counter| &counter.now)
    }

    fn read(&self, which: impl Fn(&PeakCounter) -> &AtomicU64) -> MemoryPlan {
        let of =
            |category: MemoryCategory| which(&self.0[category as usize]).load(Ordering::Relaxed);
        MemoryPlan {
            parameters: of(MemoryCategory::Parameters),
            gradients: of(MemoryCategory::Gradients),
            optimizer: of(MemoryCategory::Optimizer),
            host_optimizer: of(MemoryCategory::HostOptimizer),
            buffers: of(MemoryCategory::Buffers),
        }
    }
}

impl Drop for TrackedAllocation {
    fn drop(&mut self) {
        let counter = &self.usage.0[self.counter];
        counter.now.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// A flat tensor whose bytes are counted.
#[derive(Debug)]
pub(crate) struct TrackedTensor {
    pub tensor: Tensor<1>,
    pub allocation: TrackedAllocation,
}

impl TrackedTensor {
    pub fn new(tensor: Tensor<1>, category: MemoryCategory, usage: &MemoryUsage) -> Self {
        let allocation = usage.track_tensor(category, &tensor);
        Self { tensor, allocation }
    }

    /// Overwrites the elements that begin at index `start` with `values`.
    pub fn overwrite(&mut self, start: usize, values: Tensor<1>) {
        let nothing = Tensor::empty([0], (&values.device(), values.dtype()));
        let tensor = std::mem::replace(&mut self.tensor, nothing);
        self.tensor = flat::accumulate(tensor, start, values, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_remains_after_a_release() {
        let usage = MemoryUsage::default();
        let first = usage.track(MemoryCategory::Buffers, 100);
        let second = usage.track(MemoryCategory::Buffers, 20);
        drop(first);
        let third = usage.track(MemoryCategory::Gradients, 7);
        assert_eq!((usage.now().buffers, usage.peak().buffers), (20, 120));
        drop((second, third));
        assert_eq!((usage.now().gradients, usage.peak().gradients), (0, 7));
        assert_eq!(usage.now(), MemoryPlan::default());
    }
}
