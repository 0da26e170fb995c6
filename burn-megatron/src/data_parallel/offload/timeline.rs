//! What is transferred between a device and its host, and when, over a simulated link.

use std::time::Duration;

use parking_lot::Mutex;

use crate::comm::testing::LinkError;

/// A link between a device and its host, with a bandwidth for each direction.
///
/// The link and the computations beside it have a clock of their own: nothing waits for it, so that the times of
/// [`OffloadEvent`]s depend on neither the machine nor its load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedHostLink {
    latency: Duration,
    bytes_per_second: f64,
    host_step: Duration,
    device_step: Duration,
}

impl SimulatedHostLink {
    /// A link with `latency` for each transfer, and `bytes_per_second` in each direction.
    ///
    /// # Errors
    ///
    /// [`LinkError::Bandwidth`] for a bandwidth that is not positive.
    pub fn new(latency: Duration, bytes_per_second: f64) -> Result<Self, LinkError> {
        if bytes_per_second.is_nan() || bytes_per_second <= 0.0 {
            return Err(LinkError::Bandwidth(bytes_per_second));
        }
        Ok(Self {
            latency,
            bytes_per_second,
            host_step: Duration::ZERO,
            device_step: Duration::ZERO,
        })
    }

    /// Sets how long the step of a bucket takes on the host, and on the device; 0 by default.
    pub fn with_step_times(self, host_step: Duration, device_step: Duration) -> Self {
        Self {
            host_step,
            device_step,
            ..self
        }
    }

    fn transfer_time(&self, bytes: u64) -> Duration {
        let seconds = bytes as f64 / self.bytes_per_second;
        let time = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        self.latency.saturating_add(time)
    }
}

/// What happens to a bucket in a step.
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
}

/// An event in a step, by the clock of a [`SimulatedHostLink`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadEvent {
    /// What happens.
    pub kind: OffloadEventKind,
    /// The number of the bucket.
    pub bucket: usize,
    /// The bytes that are copied; 0 for a step.
    pub bytes: u64,
    /// When it begins.
    pub start: Duration,
    /// When it ends.
    pub end: Duration,
}

/// The events since the last call of
/// [`take_offload_record`](super::super::DistributedDataParallel::take_offload_record).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffloadRecord {
    /// In the order in which they happened. Events of different buckets that no wait orders may be in any order.
    pub events: Vec<OffloadEvent>,
    /// How long the rank was blocked in waits for offloaded buckets.
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

/// Counts transfers, and records events if a link is simulated. Each method is called by one thread only, so that the
/// times are the same in every run.
#[derive(Debug, Default)]
pub struct Timeline(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    traffic: HostTraffic,
    link: Option<SimulatedHostLink>,
    record: OffloadRecord,
    /// The time of the rank.
    now: Duration,
    /// When the host has all gradients, has made all steps, and the device has all parameters so far.
    up_free: Duration,
    host_free: Duration,
    down_free: Duration,
}

impl Timeline {
    pub fn simulate(&self, link: SimulatedHostLink) {
        self.0.lock().link = Some(link);
    }

    pub fn traffic(&self) -> HostTraffic {
        self.0.lock().traffic
    }

    pub fn take_record(&self) -> OffloadRecord {
        std::mem::take(&mut self.0.lock().record)
    }

    /// The time of the rank.
    pub fn now(&self) -> Duration {
        self.0.lock().now
    }

    /// The gradient of a bucket that was ready at `ready` has been copied; returns when it has arrived.
    pub fn up(&self, bucket: usize, bytes: u64, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        state.traffic.up += bytes;
        let time = state.link.map(|link| link.transfer_time(bytes));
        let end = state.event(
            OffloadEventKind::GradientUp,
            [bucket, bytes as usize],
            ready.max(state.up_free),
            time,
        );
        state.up_free = end;
        end
    }

    /// The host has made a step with a gradient that arrived at `ready`; returns when.
    pub fn host_step(&self, bucket: usize, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        let time = state.link.map(|link| link.host_step);
        let start = ready.max(state.host_free);
        let end = state.event(OffloadEventKind::HostStep, [bucket, 0], start, time);
        state.host_free = end;
        end
    }

    /// Parameters that were stepped at `ready` have been copied; returns when they have arrived.
    pub fn down(&self, bucket: usize, bytes: u64, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        state.traffic.down += bytes;
        let time = state.link.map(|link| link.transfer_time(bytes));
        let end = state.event(
            OffloadEventKind::ParametersDown,
            [bucket, bytes as usize],
            ready.max(state.down_free),
            time,
        );
        state.down_free = end;
        end
    }

    /// The device has stepped a bucket.
    pub fn device_step(&self, bucket: usize) {
        let state = &mut *self.0.lock();
        let time = state.link.map(|link| link.device_step);
        let start = state.now;
        state.now = state.event(OffloadEventKind::DeviceStep, [bucket, 0], start, time);
    }

    /// The rank has waited for what arrived at `done`.
    pub fn waited(&self, done: Duration) {
        let state = &mut *self.0.lock();
        state.record.blocked += done.saturating_sub(state.now);
        state.now = state.now.max(done);
    }
}

impl State {
    /// Records an event of a simulated link; returns its end.
    fn event(
        &mut self,
        kind: OffloadEventKind,
        [bucket, bytes]: [usize; 2],
        start: Duration,
        time: Option<Duration>,
    ) -> Duration {
        let Some(time) = time else { return start };
        let end = start.saturating_add(time);
        self.record.events.push(OffloadEvent {
            kind,
            bucket,
            bytes: bytes as u64,
            start,
            end,
        });
        end
    }
}
