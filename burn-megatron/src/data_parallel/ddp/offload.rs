//! Offloading: the optimizer state of a wrapped module that is stored in host memory.

use std::time::Duration;

use burn::module::Module;

use super::DistributedDataParallel;
use crate::data_parallel::offload::OffloadPlan;
use crate::host_link::{HostTraffic, OffloadRecord, SimulatedHostLink};

impl<M: Module> DistributedDataParallel<M> {
    /// Returns the buckets whose optimizer state is in host memory, and their transfers in a step.
    pub fn offload(&self) -> &OffloadPlan {
        &self.buffers.plan.offload
    }

    /// Returns the number of bytes that were copied between this rank's device and host memory in all steps so far.
    pub fn host_traffic(&self) -> HostTraffic {
        let host = self.host.as_ref();
        host.map_or_else(HostTraffic::default, |host| host.timeline().traffic())
    }

    /// Simulates the link between device and host in the next steps, and records the transfers. `host_step` and
    /// `device_step` are the simulated times of the optimizer step of one bucket on the host and on the device. If no
    /// bucket is offloaded, nothing is recorded.
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

    /// Returns the transfers that were recorded since the last call. The record is empty if no [link is
    /// simulated](Self::simulate_host_link).
    pub fn take_offload_record(&self) -> OffloadRecord {
        let host = self.host.as_ref();
        host.map_or_else(OffloadRecord::default, |host| host.timeline().take_record())
    }
}
