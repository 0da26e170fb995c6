//! The link between a device and its host: what is transferred over it, and a simulation of its times.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::comm::CommError;

/// A link between a device and its host, with a bandwidth for each direction.
///
/// The link and the computations beside it have a clock of their own: nothing waits for it, so that the times of
/// [`OffloadEvent`]s depend on neither the machine nor its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedHostLink {
    latency: Duration,
    bytes_per_second: f64,
}

/// A bandwidth that is not positive, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("invalid bandwidth {0} bytes/s: expected more than 0 (infinity for no limit)")]
pub struct BandwidthError(pub f64);

impl SimulatedHostLink {
    /// A link with `latency` for each transfer, and `bytes_per_second` in each direction.
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

/// A transfer or a computation of a bucket of the optimizer, or of the input of a recomputed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadEventKind {
    /// The gradient is copied to the host.
    GradientUp,
    /// The host steps the bucket.
    HostStep,
    /// The parameters are copied to the device.
    ParametersDown,
    /// The device steps a bucket that is not offloaded.
    DeviceStep,
    /// The input of a block is copied to the host.
    InputUp,
    /// The input of a block is copied to the device.
    InputDown,
}

/// An event, by the clock of a [`SimulatedHostLink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadEvent {
    /// The kind of event.
    pub kind: OffloadEventKind,
    /// The number of the bucket; of an input, its number among all.
    pub number: usize,
    /// The bytes that are copied; 0 for a step.
    pub bytes: u64,
    /// When it begins.
    pub start: Duration,
    /// When it ends.
    pub end: Duration,
}

/// The events since the last record.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffloadRecord {
    /// In the order in which they happened. Those of different buckets that no wait orders may be in any order.
    pub events: Vec<OffloadEvent>,
    /// The time that the rank was blocked in waits for offloaded state.
    pub blocked: Duration,
}

impl OffloadRecord {
    /// The share of the time of transfers and host steps that was hidden, behind the steps of the device or behind each
    /// other: 1 - (time blocked) / (their time). 1 if nothing was offloaded.
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

/// The bytes that were copied between a device and its host, over all steps so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostTraffic {
    /// To the host.
    pub up: u64,
    /// To the device.
    pub down: u64,
}

/// The result of `f` on a thread that copies, or the message of its panic.
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
