//! The thread that owns the wire.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use super::post::Key;
use super::rank::{Activity, RankState, Reply};
use super::wire::Wire;
use crate::error::CommError;
use crate::process::Job;

/// How long the thread looks again at once, having let others run. To spin instead is no faster where a core
/// is free, and twice as slow where none is.
const YIELD: Duration = Duration::from_micros(500);
/// The same while payloads are under way: a wire may move them only while it is looked at.
const YIELD_MOVING: Duration = Duration::from_millis(5);
/// How long it then sleeps in between.
const NAP: Duration = Duration::from_micros(50);
/// How long it sleeps with nothing under way. A call wakes it; but a wire may have something left to do for
/// other ranks, such as to take up a connection.
const SLEEP: Duration = Duration::from_millis(10);

/// What a rank asks of the thread.
pub enum Command {
    Start(Vec<Job>),
    Missing(Key, Sender<Option<Vec<usize>>>),
    Share(Option<Vec<u8>>, Reply<Vec<u8>>),
    Close(Reply<()>),
    Unclosed(Sender<Vec<usize>>),
    /// Wakes the thread, which then sees the flag.
    Abort,
}

/// How the work of the thread ended.
enum End {
    Closed,
    GivenUp,
}

pub struct Worker<W> {
    state: RankState<W>,
    commands: Receiver<Command>,
    aborted: Arc<AtomicBool>,
    closing: Option<Reply<()>>,
}

pub fn failure(engine: &str, message: String) -> CommError {
    CommError::Engine {
        engine: engine.to_owned(),
        message,
    }
}

pub fn refuse(jobs: Vec<Job>, error: &CommError) {
    for job in jobs {
        job.slot.fulfil(Err(error.clone()));
    }
}

/// The life of the thread.
pub fn serve<W: Wire>(mut worker: Worker<W>, engine: &str) {
    let error = match catch_unwind(AssertUnwindSafe(|| worker.run())) {
        Ok(Ok(End::GivenUp)) => return,
        Ok(Ok(End::Closed)) => {
            let closed = worker.state.finish();
            // Whoever waited for it may have gone.
            worker.closing.map(|reply| reply.send(closed));
            return;
        }
        Ok(Err(error)) => error,
        Err(payload) => failure(
            engine,
            format!("the thread has panicked: {}", text(&*payload)),
        ),
    };
    worker.fail(&error);
}

fn text(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("with no words")
}

/// How long to sleep after so long a quiet; not at all at first.
fn nap(activity: Activity, quiet: Duration) -> Option<Duration> {
    let (patience, nap) = match activity {
        Activity::Moving => (YIELD_MOVING, NAP),
        Activity::Waiting => (YIELD, NAP),
        Activity::None => (YIELD, SLEEP),
    };
    (quiet >= patience).then_some(nap)
}

/// The next command, waited for at most so long; an error once nobody can give one.
fn next(commands: &Receiver<Command>, nap: Option<Duration>) -> Result<Option<Command>, RecvError> {
    match nap {
        None => commands.try_recv().map(Some).or_else(|why| match why {
            TryRecvError::Empty => Ok(None),
            TryRecvError::Disconnected => Err(RecvError),
        }),
        Some(nap) => commands
            .recv_timeout(nap)
            .map(Some)
            .or_else(|why| match why {
                RecvTimeoutError::Timeout => Ok(None),
                RecvTimeoutError::Disconnected => Err(RecvError),
            }),
    }
}

impl<W: Wire> Worker<W> {
    pub fn new(state: RankState<W>, commands: Receiver<Command>, aborted: Arc<AtomicBool>) -> Self {
        Self {
            state,
            commands,
            aborted,
            closing: None,
        }
    }

    /// Looks at the commands and at the wire in turn, the more seldom the less happens.
    fn run(&mut self) -> Result<End, CommError> {
        let mut last = Instant::now();
        loop {
            let quiet = last.elapsed();
            let nap = nap(self.state.activity(), quiet);
            let Ok(command) = next(&self.commands, nap) else {
                return Ok(End::GivenUp);
            };
            if self.aborted.load(Ordering::Acquire) {
                return Ok(End::GivenUp);
            }
            let asked = command.is_some();
            command.map_or(Ok(()), |command| self.obey(command))?;
            let stirred = self.state.poll()?;
            if self.closing.is_some() && self.state.is_closed()? {
                return Ok(End::Closed);
            }
            match (asked || stirred, nap) {
                (true, _) => last = Instant::now(),
                (false, Some(_)) => {}
                (false, None) => thread::yield_now(),
            }
        }
    }

    fn obey(&mut self, command: Command) -> Result<(), CommError> {
        match command {
            Command::Start(jobs) => self.start(jobs)?,
            Command::Share(told, reply) => self.state.share(told, reply)?,
            Command::Close(reply) => {
                self.closing = Some(reply);
                self.state.close()?;
            }
            // Whoever asked may have given up.
            Command::Missing(key, reply) => drop(reply.send(self.state.missing(key))),
            Command::Unclosed(reply) => drop(reply.send(self.state.unclosed())),
            Command::Abort => {}
        }
        Ok(())
    }

    fn start(&mut self, jobs: Vec<Job>) -> Result<(), CommError> {
        let mut jobs = jobs.into_iter();
        while let Some(job) = jobs.next() {
            // The wire is of no further use: the jobs after this one fail with it.
            let started = self.state.start(job);
            started.inspect_err(|error| refuse(jobs.by_ref().collect(), error))?;
        }
        Ok(())
    }

    /// Ends with an error all that is under way and all that is still asked for.
    fn fail(mut self, error: &CommError) {
        self.state.fail_all(error);
        if let Some(reply) = self.closing {
            let _ = reply.send(Err(error.clone()));
        }
        // What is under way keeps its memory for ever: something may still write there.
        drop(self.state);
        for command in self.commands {
            match command {
                Command::Start(jobs) => refuse(jobs, error),
                Command::Share(_, reply) => drop(reply.send(Err(error.clone()))),
                Command::Close(reply) => drop(reply.send(Err(error.clone()))),
                Command::Missing(..) | Command::Unclosed(_) => {}
                Command::Abort => return,
            }
        }
    }
}
