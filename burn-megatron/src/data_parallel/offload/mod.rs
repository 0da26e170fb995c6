//! Offloading: the optimizer state of a fraction of the buckets is stored in host memory.
//!
//! Host memory holds the f32 master weights and the moments of the offloaded buckets. The optimizer step of these
//! buckets runs on the host. It calls the same function as the optimizer step of the other buckets on the device. Every
//! optimizer step has these parts:
//!
//! 1. A thread copies the gradients of all offloaded buckets to the host, one bucket after the other.
//! 2. Meanwhile the device runs the optimizer step of the other buckets.
//! 3. A second thread runs the optimizer step of each offloaded bucket as soon as its gradient has arrived. It uses the
//!    same clipping factor and loss scale as the device. Then it copies the updated parameters to the device.
//! 4. The rank waits for each offloaded bucket, and gathers the bucket like the other buckets.
//!
//! Source: Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Offload and ZeRO-Infinity).

use super::layout::BufferLayout;
use super::memory::MemoryRules;

pub(super) mod host_stepper;
#[cfg(test)]
mod tests;
mod timeline;

/// The offloaded buckets of one rank, and their transfers in a step.
///
/// Buckets are offloaded in the order of their numbers, beginning with bucket 0, until the requested fraction of the
/// bytes of the optimizer state is reached. Bucket 0 contains the last layers, whose parameters the next forward needs
/// last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadPlan {
    /// The number of offloaded buckets.
    pub buckets: usize,
    /// The number of bytes of gradients that are copied from the device to the host in a step.
    pub up: u64,
    /// The number of bytes of parameters that are copied from the host to the device in a step.
    pub down: u64,
}

impl OffloadPlan {
    /// Selects the buckets of `layout` that are offloaded. `fraction` is the fraction of the optimizer state, at most
    /// 1.
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
