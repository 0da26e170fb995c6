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

use std::time::Duration;

use burn::module::Module;
use serde::{Deserialize, Serialize};

use super::DistributedDataParallel;
use super::layout::BufferLayout;
use super::memory::MemoryRules;
use crate::host_link::{HostTraffic, OffloadRecord, SimulatedHostLink};

mod host_stepper;
#[cfg(test)]
mod tests;
mod timeline;

pub(super) use host_stepper::{HostBucket, HostStepped, HostStepper};
use timeline::Timeline;

/// The state that is kept in the memory of the host instead of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OffloadConfig {
    /// The fraction of the optimizer state, by bytes, from 0 to 1: see [`OffloadPlan`]. Needs the fused AdamW.
    pub optimizer: f64,
}

/// Settings of offload that cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum OffloadError {
    /// A fraction of the optimizer state that is none.
    #[error("invalid offload.optimizer = {0}: expected a fraction from 0 to 1")]
    Fraction(f64),
    /// Masters on the host that the device needs.
    #[error(
        "offload.optimizer = {0} moves masters to the host, and with fp8_param_gather the device quantises them in \
         every step; leave one of them out"
    )]
    Fp8(f64),
}

impl OffloadConfig {
    /// Checks the settings, beside the setting `fp8_param_gather`.
    ///
    /// # Errors
    ///
    /// [`OffloadError`] for the first invalid one.
    pub fn check(&self, fp8_param_gather: bool) -> Result<(), OffloadError> {
        let fraction = self.optimizer;
        if !(0.0..=1.0).contains(&fraction) {
            return Err(OffloadError::Fraction(fraction));
        }
        if fraction > 0.0 && fp8_param_gather {
            return Err(OffloadError::Fp8(fraction));
        }
        Ok(())
    }
}

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

impl<M: Module> DistributedDataParallel<M> {
    /// The buckets whose optimizer state is on the host, and what is transferred for them in a step.
    pub fn offload(&self) -> &OffloadPlan {
        &self.buffers.plan.offload
    }

    /// The bytes that were copied between this rank's device and its host in all steps so far.
    pub fn host_traffic(&self) -> HostTraffic {
        let host = self.host.as_ref();
        host.map_or_else(HostTraffic::default, |host| host.timeline().traffic())
    }

    /// Records the transfers of the next steps over a simulated link between device and host, where the step of a
    /// bucket takes so long on the host and on the device. Without offloaded buckets there are none.
    pub fn simulate_host_link(
        &self,
        link: SimulatedHostLink,
        host_step: Duration,
        device_step: Duration,
    ) {
        if let Some(host) = &self.host {
            host.timeline().simulate(link, host_step, device_step);
        }
    }

    /// Takes what was recorded since the last call; nothing without a [simulated link](Self::simulate_host_link).
    pub fn take_offload_record(&self) -> OffloadRecord {
        let host = self.host.as_ref();
        host.map_or_else(OffloadRecord::default, |host| host.timeline().take_record())
    }
}
