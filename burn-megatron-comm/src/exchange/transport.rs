//! What a rank does with the thread that owns its wire.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::post::Key;
use super::progress::{Command, Worker, failure, refuse, serve};
use super::rank::RankState;
use super::wire::Wire;
use crate::communicator::Group;
use crate::error::{CommError, ranks_verb};
use crate::pool::BufferPool;
use crate::process::{GroupId, Job, Transport};

/// How long a rank waits for the thread to say who is missing.
const ANSWER: Duration = Duration::from_secs(1);

const GIVEN_UP: &str = "the engine has ended, so that it moves nothing any more";

/// A transport over a wire.
pub struct Exchange {
    engine: &'static str,
    description: String,
    rank: usize,
    size: usize,
    pool: Arc<BufferPool>,
    commands: Sender<Command>,
    aborted: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Exchange {
    /// Opens a wire on a thread of its own; `open` also gives the description of the engine.
    ///
    /// # Errors
    /// Those of `open`; [`CommError::Engine`] if it does not return within `patience`.
    pub fn launch<W: Wire + 'static>(
        engine: &'static str,
        pool: Arc<BufferPool>,
        patience: Duration,
        open: impl FnOnce() -> Result<(W, String), CommError> + Send + 'static,
    ) -> Result<Self, CommError> {
        let (commands, receiver) = mpsc::channel();
        let (opened, news) = mpsc::channel();
        let aborted = Arc::new(AtomicBool::new(false));
        let (own_pool, own_aborted) = (Arc::clone(&pool), Arc::clone(&aborted));
        let run = move || match open() {
            Err(error) => drop(opened.send(Err(error))),
            Ok((wire, description)) => {
                // If nobody listens any more, the commands end at once.
                let _ = opened.send(Ok((description, wire.rank(), wire.size())));
                let state = RankState::new(wire, engine, own_pool);
                serve(Worker::new(state, receiver, own_aborted), engine);
            }
        };
        let builder = thread::Builder::new().name(format!("{engine}-progress"));
        let thread = builder
            .spawn(run)
            .map_err(|error| failure(engine, format!("no thread could be started: {error}")))?;
        let opened = news.recv_timeout(patience).unwrap_or_else(|why| {
            Err(failure(
                engine,
                match why {
                    RecvTimeoutError::Timeout => format!(
                        "the start has not returned after {:.1} s; it returns when every rank of the world \
                         has come to it",
                        patience.as_secs_f64()
                    ),
                    RecvTimeoutError::Disconnected => "the start has panicked".to_owned(),
                },
            ))
        });
        let (description, rank, size) = opened?;
        Ok(Self {
            engine,
            description,
            rank,
            size,
            pool,
            commands,
            aborted,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The number of this rank.
    #[cfg_attr(
        not(feature = "mpi"),
        allow(dead_code, reason = "for the place in MPI")
    )]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    #[cfg_attr(
        not(feature = "mpi"),
        allow(dead_code, reason = "for the place in MPI")
    )]
    pub fn size(&self) -> usize {
        self.size
    }

    /// What rank 0 gives to this, on every rank; the others give `None`. For what the ranks must know
    /// before they can make calls.
    ///
    /// # Errors
    /// [`CommError::Engine`] if rank 0 has told nothing within `patience`, gives more than fits in a note
    /// (some 3.9 KiB), or the wire fails.
    pub fn share(
        &self,
        from_rank_0: Option<&[u8]>,
        patience: Duration,
    ) -> Result<Vec<u8>, CommError> {
        let (reply, answer) = mpsc::channel();
        let told = match (self.rank, from_rank_0) {
            (0, Some(told)) => Some(told.to_vec()),
            (0, None) => {
                return Err(self.failure("rank 0 has nothing to share, but all wait for it".into()));
            }
            _ => None,
        };
        self.tell(Command::Share(told, reply))?;
        answer.recv_timeout(patience).unwrap_or_else(|why| {
            Err(self.failure(match why {
                RecvTimeoutError::Timeout => {
                    format!(
                        "rank 0 has told nothing after {:.1} s",
                        patience.as_secs_f64()
                    )
                }
                RecvTimeoutError::Disconnected => GIVEN_UP.to_owned(),
            }))
        })
    }

    fn tell(&self, command: Command) -> Result<(), CommError> {
        let told = self.commands.send(command);
        told.map_err(|_| self.failure(GIVEN_UP.to_owned()))
    }

    fn failure(&self, message: String) -> CommError {
        failure(self.engine, message)
    }

    /// Who keeps this rank from closing, in words.
    fn why_open(&self) -> String {
        let (reply, answer) = mpsc::channel();
        let ranks = match self.tell(Command::Unclosed(reply)) {
            Ok(()) => answer.recv_timeout(ANSWER).ok(),
            Err(_) => None,
        };
        match ranks {
            None => "the library does not return".to_owned(),
            Some(ranks) if ranks.is_empty() => {
                "messages of this rank are still under way".to_owned()
            }
            Some(ranks) => format!("{} not come to its end", ranks_verb(&ranks, "has", "have")),
        }
    }
}

impl Transport for Exchange {
    fn name(&self) -> &'static str {
        self.engine
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn share(&self, own: Option<&[u8]>, patience: Duration) -> Result<Vec<u8>, CommError> {
        Exchange::share(self, own, patience)
    }

    fn pool(&self) -> &Arc<BufferPool> {
        &self.pool
    }

    fn start(&self, jobs: Vec<Job>) {
        if let Err(mpsc::SendError(Command::Start(jobs))) = self.commands.send(Command::Start(jobs))
            && !self.aborted.load(Ordering::Acquire)
        {
            refuse(jobs, &self.failure(GIVEN_UP.to_owned()));
        }
    }

    fn split(&self, job: Job, _part: Arc<Group>, _part_id: GroupId) {
        // A group needs nothing but its number, which every message names.
        self.start(vec![job]);
    }

    fn missing(&self, group: GroupId, sequence: u64) -> Option<Vec<usize>> {
        let (reply, answer) = mpsc::channel();
        self.tell(Command::Missing(Key { group, sequence }, reply))
            .ok()?;
        answer.recv_timeout(ANSWER).ok()?
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        // If the thread has ended, there is nothing to give up.
        let _ = self.commands.send(Command::Abort);
    }

    fn close(&self, deadline: Duration) -> Result<(), CommError> {
        let (reply, answer) = mpsc::channel();
        self.tell(Command::Close(reply))?;
        let closed = answer.recv_timeout(deadline).unwrap_or_else(|why| {
            Err(self.failure(match why {
                RecvTimeoutError::Timeout => format!(
                    "the world has not ended after {:.1} s: {}",
                    deadline.as_secs_f64(),
                    self.why_open()
                ),
                RecvTimeoutError::Disconnected => GIVEN_UP.to_owned(),
            }))
        });
        closed?;
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // Its panics have been turned into errors.
        thread.map_or(Ok(()), |thread| thread.join().or(Ok(())))
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Exchange({}, rank {} of {})",
            self.engine, self.rank, self.size
        )
    }
}
