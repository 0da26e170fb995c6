//! The link between a device and its host: records the transfers and simulates their times.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::comm::CommError;

/// A simulated link between a device and its host. Each direction has its own bandwidth.
///
/// The transfers and the concurrent computations use a simulated clock, so no real time passes. The times of
/// [`OffloadEvent`]s therefore do not depend on the machine or its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedHostLink {
    latency: Duration,
    bytes_per_second: f64,
}

/// The error for a bandwidth that is not positive. It contains the bandwidth in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("invalid bandwidth {0} bytes/s: expected more than 0 (infinity for no limit)")]
pub struct BandwidthError(pub f64);

impl SimulatedHostLink {
    /// Creates a simulated link. Each transfer has the latency `latency`, and each direction has a bandwidth of
    /// `bytes_per_second`.
    ///
    /// # Errors
    ///
    /// [`BandwidthError`] for a bandwidth that is not positive.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Self, BandwidthError> {
        if bytes_per_second.is_nan() || bytes_per_second <= 0.0 {
            return Err(BandwidthError(bytes_per_second));
        }
        Ok(Self {
            latency,
            bytes_per_second,
        })
    }

    /// Returns the time of a transfer of `bytes` bytes.
    pub(crate) fn transfer_time(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.bytes_per_second;
        let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        self.latency.saturating_add(time)
    }
}

/// The kind of an event: a transfer or a computation. The event belongs to an optimizer bucket or to the input of a
/// recomputed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadEventKind {
    /// The gradient of a bucket is copied to the host.
    GradientUp,
    /// The host runs the optimizer step of a bucket.
    HostStep,
    /// The updated parameters of a bucket are copied to the device.
    ParametersDown,
    /// The device runs the optimizer step of a bucket that is not offloaded.
    DeviceStep,
    /// The input of a recomputed block is copied to the host.
    InputUp,
    /// The input of a recomputed block is copied back to the device.
    InputDown,
}

/// A transfer or computation, with its times on the clock of a [`SimulatedHostLink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadEvent {
    /// The kind of event.
    pub kind: OffloadEventKind,
    /// The number of the bucket. For the input of a block, it is the number of the input among all inputs.
    pub number: usize,
    /// The number of copied bytes. It is 0 for an optimizer step.
    pub bytes: u64,
    /// The time at which the transfer or computation starts.
    pub start: Duration,
    /// The time at which the transfer or computation ends.
    pub end: Duration,
}

/// The offload events since the last record was taken.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffloadRecord {
    /// The events in the order in which they happened. Concurrent events of different buckets may be in any order.
    pub events: Vec<OffloadEvent>,
    /// The time for which the rank was blocked while it waited for offloaded state.
    pub blocked: Duration,
}

impl OffloadRecord {
    /// Returns the fraction of the time of transfers and host steps that is hidden. Time is hidden if it overlaps with
    /// the optimizer steps of the device or with other transfers and host steps. The fraction is 1 - (time blocked) /
    /// (time of transfers and host steps). It is 1 if nothing was offloaded.
    pub fn hidden_share(&self) -> f64 {
        let offloaded = self
            .events
            .iter()
            .filter(|event| event.kind != OffloadEventKind::DeviceStep);
        let total: Duration = offloaded.map(|event| event.end - event.start).sum();
        if total.is_zero() {
            return 1.0;
        }
        1.0 - self.blocked.as_secs_f64() / total.as_secs_f64()
    }
}

/// The number of bytes that were copied between a device and its host in all steps so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTraffic {
    /// The number of bytes that were copied from the device to the host.
    pub up: u64,
    /// The number of bytes that were copied from the host to the device.
    pub down: u64,
}

/// Returns the result of `f`, which runs on a thread that copies, or the message of its panic.
pub(crate) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|payload| message(&*payload))
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload
        .downcast_ref::<CommError>()
        .map(ToString::to_string)
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .or_else(|| payload.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "it panicked".into())
}
