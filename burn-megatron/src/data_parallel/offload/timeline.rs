//! The transfers of offloaded buckets, and their times on a simulated link.

use std::time::Duration;

use parking_lot::Mutex;

use crate::host_link::{
    HostTraffic, OffloadEvent, OffloadEventKind, OffloadRecord, SimulatedHostLink,
};

/// Counts transfers, and records events if a link is simulated. Each method is called by only one thread, so
/// that the times are the same in every run.
#[derive(Debug, Default)]
pub struct Timeline(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    traffic: HostTraffic,
    link: Option<SimulatedHostLink>,
    /// The time to step a bucket on the host, and on the device.
    host_time: Duration,
    device_time: Duration,
    record: OffloadRecord,
    /// The current time of the rank.
    now: Duration,
    /// The times at which the host has all gradients, the host has finished all steps, and the device has all
    /// parameters.
    up_free: Duration,
    host_free: Duration,
    down_free: Duration,
}

impl Timeline {
    pub fn simulate(&self, link: SimulatedHostLink, host_time: Duration, device_time: Duration) {
        let state = &mut *self.0.lock();
        (state.host_time, state.device_time) = (host_time, device_time);
        state.link = Some(link);
    }

    pub fn traffic(&self) -> HostTraffic {
        self.0.lock().traffic
    }

    pub fn take_record(&self) -> OffloadRecord {
        std::mem::take(&mut self.0.lock().record)
    }

    /// Returns the current time of the rank.
    pub fn now(&self) -> Duration {
        self.0.lock().now
    }

    /// Records the copy of a gradient to the host. The copy can start at `ready`. Returns the arrival time of the
    /// gradient.
    pub fn up(&self, bucket: usize, bytes: u64, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        state.traffic.up += bytes;
        let start = ready.max(state.up_free);
        state.up_free = state.transfer(OffloadEventKind::GradientUp, bucket, bytes, start);
        state.up_free
    }

    /// Records an optimizer step on the host. Its gradient arrived at `ready`. Returns the time at which the step ends.
    pub fn host_step(&self, bucket: usize, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        let time = state.link.map(|_| state.host_time);
        let start = ready.max(state.host_free);
        state.host_free = state.event(OffloadEventKind::HostStep, bucket, 0, start, time);
        state.host_free
    }

    /// Records the copy of updated parameters to the device. The copy can start at `ready`. Returns the arrival time of
    /// the parameters.
    pub fn down(&self, bucket: usize, bytes: u64, ready: Duration) -> Duration {
        let state = &mut *self.0.lock();
        state.traffic.down += bytes;
        let start = ready.max(state.down_free);
        state.down_free = state.transfer(OffloadEventKind::ParametersDown, bucket, bytes, start);
        state.down_free
    }

    /// Records the optimizer step of a bucket on the device.
    pub fn device_step(&self, bucket: usize) {
        let state = &mut *self.0.lock();
        let time = state.link.map(|_| state.device_time);
        state.now = state.event(OffloadEventKind::DeviceStep, bucket, 0, state.now, time);
    }

    /// Records that the rank has waited until `done`.
    pub fn waited(&self, done: Duration) {
        let state = &mut *self.0.lock();
        state.record.blocked += done.saturating_sub(state.now);
        state.now = state.now.max(done);
    }
}

impl State {
    /// Records a transfer over the simulated link and returns its end.
    fn transfer(
        &mut self,
        kind: OffloadEventKind,
        bucket: usize,
        bytes: u64,
        start: Duration,
    ) -> Duration {
        let time = self.link.map(|link| link.transfer_time(bytes));
        self.event(kind, bucket, bytes, start, time)
    }

    /// Records an event of a simulated link and returns its end.
    fn event(
        &mut self,
        kind: OffloadEventKind,
        bucket: usize,
        bytes: u64,
        start: Duration,
        time: Option<Duration>,
    ) -> Duration {
        let Some(time) = time else { return start };
        let end = start.saturating_add(time);
        self.record.events.push(OffloadEvent {
            kind,
            number: bucket,
            bytes,
            start,
            end,
        });
        end
    }
}
