//! What a rank really holds, in bytes, now and at the most.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::Tensor;

use super::memory::MemoryPlan;

/// What memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Category {
    /// Parameters that stay.
    Parameters,
    /// Gradients that stay from micro-batch to micro-batch, and values that are gathered in their place.
    Gradients,
    /// Masters and moments.
    Optimizer,
    /// What lives for a collective or for a block.
    Buffers,
}

/// The counter of gathered blocks, after those of the categories.
const BLOCKS: usize = 4;

/// Bytes that one rank holds, by what they are for, and blocks that are gathered.
#[derive(Clone, Debug, Default)]
pub struct Usage(Arc<[Counter; 5]>);

#[derive(Debug, Default)]
struct Counter {
    now: AtomicU64,
    peak: AtomicU64,
}

/// What is counted as long as this lives.
#[derive(Debug)]
pub struct Holding {
    usage: Usage,
    counter: usize,
    amount: u64,
}

impl Usage {
    /// Counts so many bytes until the result is dropped.
    pub fn hold(&self, category: Category, bytes: usize) -> Holding {
        self.count(category as usize, bytes as u64)
    }

    /// Counts a gathered block until the result is dropped.
    pub fn hold_block(&self) -> Holding {
        self.count(BLOCKS, 1)
    }

    /// The most blocks that were gathered, or on their way, at once.
    pub fn most_blocks(&self) -> u64 {
        self.0[BLOCKS].peak.load(Ordering::Relaxed)
    }

    fn count(&self, counter: usize, amount: u64) -> Holding {
        let Counter { now, peak } = &self.0[counter];
        let sum = now.fetch_add(amount, Ordering::Relaxed) + amount;
        peak.fetch_max(sum, Ordering::Relaxed);
        Holding {
            usage: self.clone(),
            counter,
            amount,
        }
    }

    /// The same for a tensor.
    pub fn hold_tensor(&self, category: Category, tensor: &Tensor<1>) -> Holding {
        self.hold(category, tensor.dims()[0] * tensor.dtype().size())
    }

    /// The most that was held, each category for itself.
    pub fn peak(&self) -> MemoryPlan {
        self.read(|counter| &counter.peak)
    }

    /// What is held now.
    pub fn now(&self) -> MemoryPlan {
        self.read(|counter| &counter.now)
    }

    fn read(&self, which: impl Fn(&Counter) -> &AtomicU64) -> MemoryPlan {
        let of = |category: Category| which(&self.0[category as usize]).load(Ordering::Relaxed);
        MemoryPlan {
            parameters: of(Category::Parameters),
            gradients: of(Category::Gradients),
            optimizer: of(Category::Optimizer),
            buffers: of(Category::Buffers),
        }
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        let counter = &self.usage.0[self.counter];
        counter.now.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// A flat tensor whose bytes are counted.
#[derive(Debug)]
pub(crate) struct Flat {
    pub tensor: Tensor<1>,
    pub held: Holding,
}

impl Flat {
    pub fn new(tensor: Tensor<1>, category: Category, usage: &Usage) -> Self {
        let held = usage.hold_tensor(category, &tensor);
        Self { tensor, held }
    }

    /// A tensor whose bytes have been counted.
    pub fn holding(tensor: Tensor<1>, held: Holding) -> Self {
        Self { tensor, held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_when_what_made_it_has_gone() {
        let usage = Usage::default();
        let first = usage.hold(Category::Buffers, 100);
        let second = usage.hold(Category::Buffers, 20);
        drop(first);
        let third = usage.hold(Category::Gradients, 7);
        assert_eq!((usage.now().buffers, usage.peak().buffers), (20, 120));
        drop((second, third));
        assert_eq!((usage.now().gradients, usage.peak().gradients), (0, 7));
        assert_eq!(usage.now(), MemoryPlan::default());
    }
}
