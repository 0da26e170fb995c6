//! Optimizer state in the memory of the host, for a fraction of the buckets.
//!
//! The host keeps f32 masters and moments of the offloaded buckets, and steps them with the function that steps the
//! other buckets on the device. In every step of the optimizer
//!
//! 1. the gradients of all offloaded buckets are passed to a thread that copies them to the host, one after the other;
//! 2. the device steps its own buckets meanwhile;
//! 3. a second thread steps each offloaded bucket as soon as its gradient has arrived, by the factor of clipping and
//!    of the loss scale that the device uses, and copies the new parameters to the device;
//! 4. the rank waits for each bucket, and gathers it as the others.
//!
//! Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Offload and ZeRO-Infinity).

use super::layout::BufferLayout;
use super::memory::MemoryRules;

pub(super) mod host_stepper;
#[cfg(test)]
mod tests;
mod timeline;

/// The offloaded buckets of one rank, and what is transferred for them in a step.
///
/// They are the fewest buckets, from number 0 on, whose optimizer state has at least the fraction of the bytes.
/// Bucket 0 has the last layers, whose parameters the next forward needs last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadPlan {
    /// The number of offloaded buckets.
    pub buckets: usize,
    /// The bytes of the gradients that are copied to the host in a step.
    pub up: u64,
    /// The bytes of the parameters that are copied to the device in a step.
    pub down: u64,
}

impl OffloadPlan {
    /// Chooses the buckets of `layout` for a fraction of at most 1.
    pub(super) fn new(layout: &BufferLayout, rules: &MemoryRules, fraction: f64) -> Self {
        let state = |(_, buffer, bucket): (usize, &_, &_)| rules.state_of(buffer, bucket);
        let total: u128 = layout.buckets().map(state).sum();
        let wanted = fraction * total as f64;
        let (mut plan, mut offloaded) = (Self::default(), 0);
        for bucket in layout.buckets() {
            if offloaded as f64 >= wanted {
                break;
            }
            offloaded += state(bucket);
            let (number, buffer, bucket) = bucket;
            let elements = rules.stepped_elements(bucket) as u64;
            plan.buckets = number + 1;
            plan.up += elements * buffer.key.gradient.size_of() as u64;
            plan.down += elements * buffer.key.parameter.size_of() as u64;
        }
        plan
    }
}
