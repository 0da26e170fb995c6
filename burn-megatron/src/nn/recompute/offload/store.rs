//! The store of the saved inputs of recomputed blocks, which tracks the location of each input and the times of the
//! transfers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::threads::{CopyJob, Threads};
use super::{ActivationOffload, ActivationUsage};
use crate::comm::{CommError, raise};
use crate::host_link::{OffloadEvent, OffloadEventKind, OffloadRecord, SimulatedHostLink};

/// The maximum time to wait for one copy.
const DEADLINE: Duration = Duration::from_secs(300);

/// The saved inputs of one model on one rank.
#[derive(Debug)]
pub(crate) struct ActivationStore {
    config: ActivationOffload,
    shared: Arc<Shared>,
    threads: Threads,
    deadline: Duration,
}

/// The state that the rank and its threads share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The inputs, keyed by increasing numbers.
    inputs: BTreeMap<u64, Input>,
    next: u64,
    /// The number of the current forward pass.
    forward: u64,
    /// Whether an input is being copied to the host.
    is_leaving: bool,
    usage: ActivationUsage,
    failure: Option<String>,
    clock: Clock,
}

#[derive(Debug)]
struct Input {
    forward: u64,
    bytes: u64,
    device: Device,
    place: Place,
    /// The end time of the last copy on a simulated link; `None` if the input has not left.
    arrives: Option<Duration>,
}

#[derive(Debug)]
enum Place {
    Device(Tensor<1>),
    /// The input is being copied to the host. The flag is set if it must return immediately.
    Leaving(bool),
    Host(Tensor<1>),
    Returning,
}

/// The clock of a simulated link.
#[derive(Debug, Default)]
struct Clock {
    link: Option<SimulatedHostLink>,
    forward: Duration,
    backward: Duration,
    now: Duration,
    up_free: Duration,
    down_free: Duration,
    record: OffloadRecord,
}

impl ActivationStore {
    /// Starts the copy threads.
    ///
    /// # Errors
    ///
    /// The error of the operating system.
    pub fn start(config: ActivationOffload) -> std::io::Result<Self> {
        Self::with_deadline(config, DEADLINE)
    }

    pub(super) fn with_deadline(
        config: ActivationOffload,
        deadline: Duration,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        Ok(Self {
            config,
            threads: Threads::start(&shared)?,
            shared,
            deadline,
        })
    }

    /// Simulates a copy to the host that never ends.
    #[cfg(test)]
    pub(super) fn stall(&self) {
        self.shared.state.lock().is_leaving = true;
    }

    /// Simulates the failure of a thread.
    #[cfg(test)]
    pub(super) fn fail(&self, message: &str) {
        self.shared.fail(message.into());
    }

    pub fn usage(&self) -> ActivationUsage {
        self.shared.state.lock().usage
    }

    /// Begins a forward pass, whose saved inputs form a chain.
    pub fn begin_forward(&self) {
        self.shared.state.lock().forward += 1;
    }

    /// Simulates the transfers over a link and records them. `forward` and `backward` are the times of the forward pass
    /// and backward pass of a block.
    pub fn simulate(&self, link: SimulatedHostLink, forward: Duration, backward: Duration) {
        let clock = &mut self.shared.state.lock().clock;
        (clock.forward, clock.backward) = (forward, backward);
        clock.link = Some(link);
    }

    pub fn take_record(&self) -> OffloadRecord {
        std::mem::take(&mut self.shared.state.lock().clock.record)
    }

    /// Keeps the input of a block and returns its number. If an input is being copied to the host, waits for this
    /// copy before another input leaves.
    ///
    /// Panics (see [`raise`]) if a copy fails or takes too long, like [`take`](Self::take).
    pub fn save(&self, x: Tensor<1>) -> u64 {
        let state = &mut self.shared.state.lock();
        let (number, forward) = (state.next, state.forward);
        state.next += 1;
        let bytes = (x.dims()[0] * x.dtype().size()) as u64;
        let input = Input {
            forward,
            bytes,
            device: x.device(),
            place: Place::Device(x),
            arrives: None,
        };
        state.inputs.insert(number, input);
        state.usage.add_device(bytes);
        state.clock.run_forward();
        let oldest = state.chain(forward, number + 1).nth(self.config.prefetch);
        if let Some(oldest) = oldest {
            self.leave(oldest, state);
        }
        number
    }

    /// Sends an input to the host, if it is on the device and fits into the budget.
    fn leave(&self, number: u64, state: &mut MutexGuard<'_, State>) {
        let input = &state.inputs[&number];
        let is_here = matches!(input.place, Place::Device(_));
        if !is_here || state.usage.host + input.bytes > self.config.bytes {
            return;
        }
        while state.is_leaving {
            self.wait(number, state);
        }
        let state = &mut **state;
        let Some(input) = state.inputs.get_mut(&number) else {
            return;
        };
        if let Place::Device(x) = std::mem::replace(&mut input.place, Place::Leaving(false)) {
            state.is_leaving = true;
            state.usage.add_host(input.bytes);
            state.usage.traffic.up += input.bytes;
            state.clock.wait_until(state.clock.up_free);
            let copy = (number, input.bytes);
            input.arrives = state.clock.transfer(OffloadEventKind::InputUp, copy, None);
            _ = self.threads.up.send(CopyJob::new(number, x, input));
        }
    }

    /// Takes an input for the backward of its block, and starts to fetch the inputs before it.
    pub fn take(&self, number: u64) -> Tensor<1> {
        let state = &mut self.shared.state.lock();
        self.fetch(number, state);
        while !matches!(state.inputs[&number].place, Place::Device(_)) {
            self.wait(number, state);
        }
        let Some(input) = state.inputs.remove(&number) else {
            unreachable!("it is in its place")
        };
        let Place::Device(x) = input.place else {
            unreachable!("it has arrived")
        };
        state.usage.device -= input.bytes;
        if let Some(arrives) = input.arrives {
            state.clock.wait_until(arrives);
        }
        let ahead = state.chain(input.forward, number);
        let ahead: Vec<_> = ahead.take(self.config.prefetch).collect();
        ahead.into_iter().for_each(|it| self.fetch(it, state));
        state.clock.run_backward();
        x
    }

    /// Starts to copy an input to the device, unless it is already there or being copied.
    fn fetch(&self, number: u64, state: &mut State) {
        let Some(input) = state.inputs.get_mut(&number) else {
            return;
        };
        match &mut input.place {
            Place::Leaving(returns) if !*returns => *returns = true,
            Place::Host(_) => {
                if let Place::Host(x) = std::mem::replace(&mut input.place, Place::Returning) {
                    state.usage.add_device(input.bytes);
                    _ = self.threads.down.send(CopyJob::new(number, x, input));
                }
            }
            _ => return,
        }
        state.usage.traffic.down += input.bytes;
        let (kind, copy) = (OffloadEventKind::InputDown, (number, input.bytes));
        input.arrives = state.clock.transfer(kind, copy, input.arrives);
    }

    /// Drops an input that no backward pass has taken.
    pub fn forget(&self, number: u64) {
        let state = &mut *self.shared.state.lock();
        if let Some(input) = state.inputs.remove(&number) {
            match input.place {
                Place::Device(_) => state.usage.device -= input.bytes,
                // Inputs that are being copied are subtracted from the device when their copy ends.
                _ => state.usage.host -= input.bytes,
            }
        }
    }

    /// Waits until a thread has finished a copy.
    fn wait(&self, number: u64, state: &mut MutexGuard<'_, State>) {
        let fail = |message: String| -> ! {
            raise(CommError::Engine {
                engine: "activation offload".into(),
                message: format!("the input {number} of a recomputed block: {message}"),
            })
        };
        if let Some(failure) = &state.failure {
            fail(failure.clone());
        }
        let waited = self.shared.changed.wait_for(state, self.deadline);
        if waited.timed_out() {
            let seconds = self.deadline.as_secs_f64();
            fail(format!("no copy has ended after {seconds} s"));
        }
    }
}

impl Shared {
    /// Records that an input has arrived on the host. Returns the copy job for the way back if the input must return to
    /// the device immediately.
    pub fn is_up(&self, job: CopyJob) -> Option<CopyJob> {
        let state = &mut *self.state.lock();
        state.is_leaving = false;
        state.usage.device -= job.bytes;
        self.changed.notify_all();
        let input = state.inputs.get_mut(&job.number)?;
        if matches!(input.place, Place::Leaving(true)) {
            input.place = Place::Returning;
            state.usage.add_device(job.bytes);
            return Some(job);
        }
        input.place = Place::Host(job.x);
        None
    }

    /// Records that an input has arrived on the device.
    pub fn is_down(&self, job: CopyJob) {
        let state = &mut *self.state.lock();
        match state.inputs.get_mut(&job.number) {
            Some(input) => {
                input.place = Place::Device(job.x);
                state.usage.host -= job.bytes;
            }
            None => state.usage.device -= job.bytes,
        }
        self.changed.notify_all();
    }

    pub fn fail(&self, message: String) {
        self.state.lock().failure.get_or_insert(message);
        self.changed.notify_all();
    }
}

impl State {
    /// Returns the inputs of a forward pass that were saved before `number`, starting with the last.
    fn chain(&self, forward: u64, number: u64) -> impl Iterator<Item = u64> {
        let before = self.inputs.range(..number).rev();
        let own = before.filter(move |(_, input)| input.forward == forward);
        own.map(|(number, _)| *number)
    }
}

impl ActivationUsage {
    fn add_device(&mut self, bytes: u64) {
        self.device += bytes;
        self.device_peak = self.device_peak.max(self.device);
    }

    fn add_host(&mut self, bytes: u64) {
        self.host += bytes;
        self.host_peak = self.host_peak.max(self.host);
    }
}

impl CopyJob {
    fn new(number: u64, x: Tensor<1>, input: &Input) -> Self {
        Self {
            number,
            x,
            bytes: input.bytes,
            device: input.device.clone(),
        }
    }
}

impl Clock {
    fn run_forward(&mut self) {
        self.now += self.forward;
    }

    fn run_backward(&mut self) {
        self.now += self.backward;
    }

    /// Records a requested copy of an input that is available at `ready`. Returns its end time. Copies in one
    /// direction run one after another.
    fn transfer(
        &mut self,
        kind: OffloadEventKind,
        (number, bytes): (u64, u64),
        ready: Option<Duration>,
    ) -> Option<Duration> {
        let duration = self.link?.transfer_time(bytes);
        let free = match kind {
            OffloadEventKind::InputUp => &mut self.up_free,
            _ => &mut self.down_free,
        };
        let start = self.now.max(*free).max(ready.unwrap_or_default());
        let end = start.saturating_add(duration);
        *free = end;
        self.record.events.push(OffloadEvent {
            kind,
            number: number as usize,
            bytes,
            start,
            end,
        });
        Some(end)
    }

    fn wait_until(&mut self, time: Duration) {
        self.record.blocked += time.saturating_sub(self.now);
        self.now = self.now.max(time);
    }
}
