//! Optimizer state in host memory, for a fraction of the buckets.
//!
//! The host stores f32 masters and moments of the offloaded buckets. It steps them with the same function as
//! the buckets on the device. In every optimizer step:
//!
//! 1. The gradients of all offloaded buckets are passed to a thread, which copies them to the host one after
//!    the other.
//! 2. Meanwhile the device steps its own buckets.
//! 3. A second thread steps each offloaded bucket as soon as its gradient has arrived. It uses the same factors
//!    of clipping and loss scale as the device. Then it copies the new parameters to the device.
//! 4. The rank waits for each bucket, and gathers it like the other buckets.
//!
//! Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Offload and ZeRO-Infinity).

use super::layout::BufferLayout;
use super::memory::MemoryRules;

pub(super) mod host_stepper;
#[cfg(test)]
mod tests;
mod timeline;

/// The offloaded buckets of one rank, and their transfers in a step.
///
/// Buckets are offloaded from number 0 on, until the given fraction of the optimizer state in bytes is reached.
/// Bucket 0 contains the last layers, whose parameters the next forward needs last.
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
    /// Selects the buckets of `layout` for a fraction of at most 1.
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
