//! The single thread that calls NCCL for a rank. Only the [creation](super::opening) of communicators uses other
//! threads.
//!
//! Collectives run on one stream or on [two streams](super::collective_streams), in the order in which they were
//! started. A message may be sent long before it is received, so no other call may be queued behind it. Therefore, each
//! direction between two ranks has a separate communicator and a separate stream for messages.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use super::buffers::Staging;
use super::call::NcclCall;
use super::communicator::{CallQueue, CommKey, CommState, NcclCommunicator};
use super::driver::{Priority, RecordedEvent, Stream};
use super::engine_state::{EngineState, Split, WorkerCommand};
use super::library::Comm;
use crate::error::CommError;
use crate::process::ResultSlot;
use close::CloseRequest;
use launch::LaunchedCall;

mod close;
mod communicators;
mod completion;
mod launch;
mod registered;

/// The time for which the thread continues to poll without sleeping after it made progress. NCCL takes about this time
/// to launch a collective.
const SPIN: Duration = Duration::from_micros(50);
/// The sleep time between two polls while calls are in flight.
const POLL_INTERVAL: Duration = Duration::from_micros(20);
/// The sleep time between two polls after [`IDLE_AFTER`] without progress.
const IDLE_POLL_INTERVAL: Duration = Duration::from_micros(200);
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// The interval between two polls of the communicators for asynchronous errors.
const ERROR_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// The time for which memory is kept alive if a device does not complete aborted work.
const ABORT_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The queues of collectives.
const COLLECTIVES: [CallQueue; 2] = [
    CallQueue::Collectives(Priority::Normal),
    CallQueue::Collectives(Priority::High),
];

/// The maximum number of commands that are handled before other work is done.
const MAX_COMMANDS_AT_ONCE: usize = 64;

pub(super) struct NcclWorker {
    shared: Arc<EngineState>,
    self_sender: Sender<WorkerCommand>,
    communicators: BTreeMap<CommKey, NcclCommunicator>,
    /// The streams of normal and high-priority collectives. They may be the same stream.
    collective_stream: Stream,
    high_priority_stream: Stream,
    /// The stream for copies between host buffers and the device.
    copy_stream: Stream,
    staging: Staging,
    /// Work that is not launched yet, in the order in which it was started.
    waiting: VecDeque<WorkItem>,
    /// Calls that NCCL is still launching.
    launching: Vec<Vec<LaunchedCall>>,
    /// Calls that are on their streams.
    in_flight: VecDeque<InFlightCall>,
    /// Splits in which this rank gets no new communicator, each with the parent communicator.
    empty_splits: Vec<(Comm, Box<AtomicPtr<c_void>>, Arc<ResultSlot>)>,
    closing: Option<CloseRequest>,
    errors_checked_at: Instant,
    last_progress: Instant,
    aborted_at: Option<Instant>,
}

enum WorkItem {
    Calls(Vec<NcclCall>),
    Split(Split),
}

/// A call that has been put on its stream.
struct InFlightCall {
    call: NcclCall,
    comm: Comm,
    done: Arc<RecordedEvent>,
    /// Whether the error of the call has already been reported.
    failed: bool,
}

impl NcclWorker {
    pub fn new(
        shared: Arc<EngineState>,
        self_sender: Sender<WorkerCommand>,
    ) -> Result<Self, String> {
        shared.driver.make_current()?;
        shared.driver.ignore_captures()?;
        let stream = |priority| shared.driver.create_stream(priority);
        let collective_stream = stream(Priority::Normal)?;
        let high_priority_stream = if shared.streams.are_two() {
            stream(Priority::High)?
        } else {
            collective_stream
        };
        let copy_stream = stream(Priority::Normal)?;
        let staging = Staging::new(shared.driver.clone(), copy_stream);
        let now = Instant::now();
        Ok(Self {
            shared,
            self_sender,
            communicators: BTreeMap::new(),
            collective_stream,
            high_priority_stream,
            copy_stream,
            staging,
            waiting: VecDeque::new(),
            launching: vec![],
            in_flight: VecDeque::new(),
            empty_splits: vec![],
            closing: None,
            errors_checked_at: now,
            last_progress: now,
            aborted_at: None,
        })
    }

    /// Runs the thread until it receives the command `Quit`.
    pub fn run(mut self, commands: &Receiver<WorkerCommand>) {
        end_sleeps_in_time();
        let mut quit = false;
        while !quit {
            let first = self.next(commands);
            for command in first
                .into_iter()
                .chain(commands.try_iter().take(MAX_COMMANDS_AT_ONCE))
            {
                quit |= matches!(command, WorkerCommand::Quit);
                self.handle(command);
            }
            if self.shared.comms.aborted.load(Ordering::Acquire) {
                self.abort();
            } else {
                self.advance_communicators();
                self.open_missing();
                self.launch_ready_calls();
                self.poll_launches();
                self.check_async_errors();
            }
            self.complete_calls();
            self.continue_close();
        }
        self.abort();
        while !self.in_flight.is_empty() {
            std::thread::sleep(IDLE_POLL_INTERVAL);
            self.complete_calls();
        }
        self.staging.clear();
    }

    /// Returns the next command. Returns `None` if other work must be done first.
    fn next(&self, commands: &Receiver<WorkerCommand>) -> Option<WorkerCommand> {
        let received = match pause_after(self.last_progress.elapsed()) {
            None => {
                std::hint::spin_loop();
                commands
                    .try_recv()
                    .map_err(|error| error == TryRecvError::Disconnected)
            }
            Some(_) if self.idle() => commands.recv().map_err(|_| true),
            Some(pause) => commands
                .recv_timeout(pause)
                .map_err(|error| error == RecvTimeoutError::Disconnected),
        };
        received.map_or_else(|is_over| is_over.then_some(WorkerCommand::Quit), Some)
    }

    fn idle(&self) -> bool {
        let aborted = self.shared.comms.aborted.load(Ordering::Acquire);
        self.waiting.is_empty()
            && self.launching.is_empty()
            && self.in_flight.is_empty()
            && !self.is_splitting()
            && self.closing.is_none()
            && aborted == self.aborted_at.is_some()
    }

    fn handle(&mut self, command: WorkerCommand) {
        self.last_progress = Instant::now();
        match command {
            WorkerCommand::Close { until, reply } => {
                self.closing = Some(CloseRequest::new(until, reply))
            }
            // Later commands are dropped, like the waiting commands.
            _ if self.aborted_at.is_some() => {}
            WorkerCommand::Open { opening, reply } => self.open(vec![opening], Some(reply)),
            WorkerCommand::Opened { key, result } => self.opened(key, result),
            WorkerCommand::Calls(calls) => self.waiting.push_back(WorkItem::Calls(calls)),
            WorkerCommand::Split(split) => self.waiting.push_back(WorkItem::Split(split)),
            WorkerCommand::Wake | WorkerCommand::Quit => {}
        }
    }

    /// Aborts every communicator. Waiting calls are dropped without a result.
    fn abort(&mut self) {
        if self.aborted_at.is_some() {
            return;
        }
        self.aborted_at = Some(Instant::now());
        self.shared.comms.aborted.store(true, Ordering::Release);
        self.shared.comms.abort_all(&self.shared.library);
        self.waiting.clear();
        for (call, _) in self.launching.drain(..).flatten() {
            call.leak();
        }
        // The library may still write to the slots.
        for (_, slot, _) in self.empty_splits.drain(..) {
            Box::leak(slot);
        }
        for comm in mem::take(&mut self.communicators).into_values() {
            if let CommState::Splitting { slot, .. } = comm.state {
                Box::leak(slot);
            }
        }
    }
}

/// Returns the sleep time before the next poll. `quiet` is the time since the last progress. Returns `None` if the
/// thread should not sleep.
fn pause_after(quiet: Duration) -> Option<Duration> {
    match quiet {
        _ if quiet < SPIN => None,
        _ if quiet < IDLE_AFTER => Some(POLL_INTERVAL),
        _ => Some(IDLE_POLL_INTERVAL),
    }
}

/// Makes the sleeps of this thread precise. By default, Linux extends a sleep by up to 50 us to save power.
#[cfg(target_os = "linux")]
fn end_sleeps_in_time() {
    // If the timer slack cannot be set, sleeps are longer.
    let _ = nix::sys::prctl::set_timerslack(1);
}

#[cfg(not(target_os = "linux"))]
fn end_sleeps_in_time() {}

fn distinct<T: PartialEq>(all: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = vec![];
    for one in all {
        if !seen.contains(&one) {
            seen.push(one);
        }
    }
    seen
}

impl WorkItem {
    fn queues(&self) -> Vec<CallQueue> {
        match self {
            WorkItem::Split(_) => COLLECTIVES.to_vec(),
            WorkItem::Calls(calls) => distinct(calls.iter().map(|call| call.queue)),
        }
    }

    fn refuse(&self, error: &CommError) {
        match self {
            WorkItem::Split(split) => split.reply.fulfil(Err(error.clone())),
            WorkItem::Calls(calls) => calls.iter().for_each(|call| call.refuse(error.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_sleeps_only_if_nothing_has_happened_for_a_while() {
        assert_eq!(pause_after(Duration::ZERO), None);
        assert_eq!(pause_after(SPIN - Duration::from_nanos(1)), None);
        assert_eq!(pause_after(SPIN), Some(POLL_INTERVAL));
        assert_eq!(pause_after(IDLE_AFTER), Some(IDLE_POLL_INTERVAL));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn sleeps_are_not_prolonged() {
        let slack = std::thread::spawn(|| {
            end_sleeps_in_time();
            nix::sys::prctl::get_timerslack()
        });
        assert_eq!(slack.join().unwrap(), Ok(1));
    }
}
