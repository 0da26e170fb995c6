//! The thread that owns the transport of a process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use super::p2p::P2pTransport;
use super::rank::{Activity, RankState, Reply};
use crate::error::CommError;
use crate::process::Job;
use crate::world::from_panic;
use burn_megatron_rendezvous::CallId;

/// The time for which the thread polls without sleeping. The thread yields between two polls. Without the yield,
/// polling is not faster if a CPU core is free, and half as fast if no core is free.
const SPIN_TIME: Duration = Duration::from_micros(500);
/// The time for which the thread polls without sleeping while payloads are in flight. Some transports make progress
/// only while they are polled.
const TRANSFER_SPIN_TIME: Duration = Duration::from_millis(5);
/// The sleep time between two polls after the time without sleeping is over.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// The sleep time between two polls while nothing is in flight. A call wakes the thread, but a transport may have to do
/// work for other ranks, for example accept a connection.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A command that the rank sends to the thread.
pub enum ProgressCommand {
    Start(Vec<Job>),
    Missing(CallId, Sender<Option<Vec<usize>>>),
    Share(Option<Vec<u8>>, Reply<Vec<u8>>),
    Close(Reply<()>),
    Unclosed(Sender<Vec<usize>>),
    /// Wakes the thread, which then checks the abort flag.
    Abort,
}

/// The reason why the thread ended.
enum ExitReason {
    Closed,
    Aborted,
}

pub struct ProgressWorker<W> {
    state: RankState<W>,
    commands: Receiver<ProgressCommand>,
    aborted: Arc<AtomicBool>,
    closing: Option<Reply<()>>,
}

pub fn refuse(jobs: Vec<Job>, error: &CommError) {
    for job in jobs {
        job.slot.fulfil(Err(error.clone()));
    }
}

/// The main function of the thread.
pub fn serve<W: P2pTransport>(mut worker: ProgressWorker<W>, engine: &str) {
    let error = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(Ok(ExitReason::Aborted)) => return,
        Ok(Ok(ExitReason::Closed)) => {
            let closed = worker.state.finish();
            // The caller may have stopped waiting.
            worker.closing.map(|reply| reply.send(closed));
            return;
        }
        Ok(Err(error)) => error,
        Err(payload) => {
            let panic = from_panic(payload);
            CommError::engine(engine, format!("the progress thread {panic}"))
        }
    };
    worker.fail(&error);
}

/// Returns the sleep time before the next poll, given the time since the last event. Returns `None` if the thread
/// should not sleep.
fn delay(activity: Activity, idle_time: Duration) -> Option<Duration> {
    let (patience, delay) = match activity {
        Activity::Transferring => (TRANSFER_SPIN_TIME, POLL_INTERVAL),
        Activity::Waiting => (SPIN_TIME, POLL_INTERVAL),
        Activity::Idle => (SPIN_TIME, IDLE_POLL_INTERVAL),
    };
    (idle_time >= patience).then_some(delay)
}

/// Returns the next command, or `None` if no command arrives within `delay`. Returns an error if the sender of commands
/// was dropped.
fn next(
    commands: &Receiver<ProgressCommand>,
    delay: Option<Duration>,
) -> Result<Option<ProgressCommand>, RecvError> {
    match delay {
        None => commands.try_recv().map(Some).or_else(|why| match why {
            TryRecvError::Empty => Ok(None),
            TryRecvError::Disconnected => Err(RecvError),
        }),
        Some(delay) => commands
            .recv_timeout(delay)
            .map(Some)
            .or_else(|why| match why {
                RecvTimeoutError::Timeout => Ok(None),
                RecvTimeoutError::Disconnected => Err(RecvError),
            }),
    }
}

impl<W: P2pTransport> ProgressWorker<W> {
    pub fn new(
        state: RankState<W>,
        commands: Receiver<ProgressCommand>,
        aborted: Arc<AtomicBool>,
    ) -> Self {
        Self {
            state,
            commands,
            aborted,
            closing: None,
        }
    }

    /// Handles commands and polls the transport until the thread ends. The thread polls less often if nothing happens.
    fn run(&mut self) -> Result<ExitReason, CommError> {
        let mut last = Instant::now();
        loop {
            let idle_time = last.elapsed();
            let delay = delay(self.state.activity(), idle_time);
            let Ok(command) = next(&self.commands, delay) else {
                return Ok(ExitReason::Aborted);
            };
            if self.aborted.load(Ordering::Acquire) {
                return Ok(ExitReason::Aborted);
            }
            let asked = command.is_some();
            command.map_or(Ok(()), |command| self.execute(command))?;
            let any_event = self.state.poll()?;
            if self.closing.is_some() && self.state.is_closed()? {
                return Ok(ExitReason::Closed);
            }
            match (asked || any_event, delay) {
                (true, _) => last = Instant::now(),
                (false, Some(_)) => {}
                (false, None) => thread::yield_now(),
            }
        }
    }

    fn execute(&mut self, command: ProgressCommand) -> Result<(), CommError> {
        match command {
            ProgressCommand::Start(jobs) => self.start(jobs)?,
            ProgressCommand::Share(bytes, reply) => self.state.share(bytes, reply)?,
            ProgressCommand::Close(reply) => {
                self.closing = Some(reply);
                self.state.close()?;
            }
            // The caller may have stopped waiting.
            ProgressCommand::Missing(key, reply) => drop(reply.send(self.state.missing(key))),
            ProgressCommand::Unclosed(reply) => drop(reply.send(self.state.unclosed())),
            ProgressCommand::Abort => {}
        }
        Ok(())
    }

    fn start(&mut self, jobs: Vec<Job>) -> Result<(), CommError> {
        let mut jobs = jobs.into_iter();
        while let Some(job) = jobs.next() {
            // If the transport has failed, the remaining jobs fail with it.
            let started = self.state.start(job);
            started.inspect_err(|error| refuse(jobs.by_ref().collect(), error))?;
        }
        Ok(())
    }

    /// Fails every call in flight, and every command that is sent later.
    fn fail(mut self, error: &CommError) {
        self.state.fail_all(error);
        if let Some(reply) = self.closing {
            let _ = reply.send(Err(error.clone()));
        }
        // The memory of requests in flight is leaked, because the transport may still write to it.
        drop(self.state);
        for command in self.commands {
            match command {
                ProgressCommand::Start(jobs) => refuse(jobs, error),
                ProgressCommand::Share(_, reply) => drop(reply.send(Err(error.clone()))),
                ProgressCommand::Close(reply) => drop(reply.send(Err(error.clone()))),
                ProgressCommand::Missing(..) | ProgressCommand::Unclosed(_) => {}
                ProgressCommand::Abort => return,
            }
        }
    }
}
