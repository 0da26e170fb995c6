//! Returns freed device memory to the driver, according to a schedule.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::Device;
use burn_megatron_kernels::device_memory::return_freed_memory;

/// The number of first steps in which memory is also returned before each forward.
///
/// CubeCL's pool switches to larger pages when an allocation exceeds its pages, and frees smaller pages once
/// they are empty. Before the first forward, the pages of the initial weights are freed. Before the second
/// forward, the pages of the first forward's activations are freed.
const FIRST_STEPS: usize = 3;

/// After the first steps, memory is returned once per this number of steps.
const INTERVAL: usize = 100;

/// Returns freed device memory to the driver, so that libraries other than CubeCL can use it.
#[derive(Debug)]
pub(super) struct FreedMemory {
    /// The number of finished steps of this process.
    steps: AtomicUsize,
    /// Whether memory may be returned before a forward. It is false if CUDA graphs are captured.
    before_forward: bool,
}

impl FreedMemory {
    pub fn new(before_forward: bool) -> Self {
        Self {
            steps: AtomicUsize::new(0),
            before_forward,
        }
    }

    /// Returns freed memory to the driver before a forward, if the schedule requires it.
    pub fn before_forward(&self, device: &Device) {
        if self.is_due_before_forward() {
            return_freed_memory(device);
        }
    }

    /// Returns freed memory to the driver after a step, if the schedule requires it. The step must have freed its
    /// gradients.
    pub fn after_step(&self, device: &Device) {
        if self.is_due_after_step() {
            return_freed_memory(device);
        }
    }

    fn is_due_before_forward(&self) -> bool {
        self.before_forward && self.steps.load(Ordering::Relaxed) < FIRST_STEPS
    }

    /// Counts a step and returns whether memory is due to be returned.
    fn is_due_after_step(&self) -> bool {
        let steps = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        steps <= FIRST_STEPS || steps.is_multiple_of(INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_returned_in_the_first_steps_and_then_regularly() {
        let [eager, captured] = [true, false].map(FreedMemory::new);
        let (mut before_forward, mut after) = (vec![], vec![]);
        for step in 1..=200 {
            if eager.is_due_before_forward() {
                before_forward.push(step);
            }
            if eager.is_due_after_step() {
                after.push(step);
            }
            assert!(!captured.is_due_before_forward());
        }
        assert_eq!(before_forward, [1, 2, 3]);
        assert_eq!(after, [1, 2, 3, 100, 200]);
    }
}
