//! The interface between a rank and the thread that owns the transport.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;

use super::p2p::P2pTransport;
use super::progress::{ProgressCommand, ProgressWorker, refuse, serve};
use super::rank::RankState;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::{Job, Transport};
use burn_megatron_rendezvous::{CallId, GroupId, ranks_verb};

/// The timeout of a query to the thread.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

const STOPPED: &str = "the engine has stopped and starts no more calls";

/// A [`Transport`] whose collectives are composed of point-to-point messages.
pub struct P2pCollectives {
    engine: &'static str,
    description: String,
    rank: usize,
    size: usize,
    pool: Arc<BufferPool>,
    commands: Sender<ProgressCommand>,
    aborted: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl P2pCollectives {
    /// Starts a thread that opens a point-to-point transport. `open` returns the transport and a description of the
    /// engine.
    ///
    /// # Errors
    /// The errors of `open`. [`CommError::Engine`] if `open` does not return within `timeout`.
    pub fn launch<W: P2pTransport + 'static>(
        engine: &'static str,
        pool: Arc<BufferPool>,
        timeout: Duration,
        open: impl FnOnce() -> Result<(W, String), CommError> + Send + 'static,
    ) -> Result<Self, CommError> {
        let (commands, receiver) = mpsc::channel();
        let (opened, started) = mpsc::channel();
        let aborted = Arc::new(AtomicBool::new(false));
        let (own_pool, own_aborted) = (Arc::clone(&pool), Arc::clone(&aborted));
        let run = move || match open() {
            Err(error) => drop(opened.send(Err(error))),
            Ok((transport, description)) => {
                // If the caller has stopped waiting, the command channel is closed.
                let _ = opened.send(Ok((description, transport.rank(), transport.size())));
                let state = RankState::new(transport, engine, own_pool);
                serve(ProgressWorker::new(state, receiver, own_aborted), engine);
            }
        };
        let builder = thread::Builder::new().name(format!("{engine}-progress"));
        let failed = |message: String| CommError::engine(engine, message);
        let thread = builder
            .spawn(run)
            .map_err(|error| failed(format!("cannot start a thread: {error}")))?;
        let opened = started.recv_timeout(timeout).unwrap_or_else(|why| {
            Err(failed(match why {
                RecvTimeoutError::Timeout => format!(
                    "not started after {:.1} s: expected all ranks of the world to start the engine",
                    timeout.as_secs_f64()
                ),
                RecvTimeoutError::Disconnected => "the start panicked".to_owned(),
            }))
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

    /// Returns the rank of this process.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "for the rank in MPI"))]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks in the world.
    #[cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "for the rank in MPI"))]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Broadcasts bytes from rank 0. Other ranks pass `None`. The ranks need these bytes before they can issue calls.
    ///
    /// # Errors
    /// [`CommError::Engine`] if rank 0 sends nothing within `timeout`, if the transport fails, or if the bytes do not
    /// fit into a control message (about 3.9 KiB).
    pub fn share(
        &self,
        from_rank_0: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Vec<u8>, CommError> {
        let (reply, answer) = mpsc::channel();
        let bytes = match (self.rank, from_rank_0) {
            (0, Some(bytes)) => Some(bytes.to_vec()),
            (0, None) => {
                return Err(
                    self.failure("rank 0 must give the bytes to share, but gave none".into())
                );
            }
            _ => None,
        };
        self.submit(ProgressCommand::Share(bytes, reply))?;
        self.reply_within(timeout, &answer, || {
            let seconds = timeout.as_secs_f64();
            format!("nothing received from rank 0 after {seconds:.1} s")
        })
    }

    /// Returns the reply of the thread. `late` creates the error message if there is no reply.
    fn reply_within<T>(
        &self,
        timeout: Duration,
        reply: &Receiver<Result<T, CommError>>,
        late: impl FnOnce() -> String,
    ) -> Result<T, CommError> {
        reply.recv_timeout(timeout).unwrap_or_else(|why| {
            Err(self.failure(match why {
                RecvTimeoutError::Timeout => late(),
                RecvTimeoutError::Disconnected => STOPPED.to_owned(),
            }))
        })
    }

    fn submit(&self, command: ProgressCommand) -> Result<(), CommError> {
        let sent = self.commands.send(command);
        sent.map_err(|_| self.failure(STOPPED.to_owned()))
    }

    fn failure(&self, message: String) -> CommError {
        CommError::engine(self.engine, message)
    }

    /// Describes the reason why this rank cannot close the transport yet.
    fn close_blocker(&self) -> String {
        let (reply, answer) = mpsc::channel();
        let ranks = match self.submit(ProgressCommand::Unclosed(reply)) {
            Ok(()) => answer.recv_timeout(QUERY_TIMEOUT).ok(),
            Err(_) => None,
        };
        match ranks {
            None => "a call of the library has not returned".to_owned(),
            Some(ranks) if ranks.is_empty() => {
                "messages of this rank are still in flight".to_owned()
            }
            Some(ranks) => format!("{} not closed the world", ranks_verb(&ranks, "has", "have")),
        }
    }
}

impl Transport for P2pCollectives {
    fn name(&self) -> &'static str {
        self.engine
    }

    fn description(&self) -> String {
        self.description.clone()
    }

    fn share(&self, own: Option<&[u8]>, timeout: Duration) -> Result<Vec<u8>, CommError> {
        P2pCollectives::share(self, own, timeout)
    }

    fn pool(&self) -> &Arc<BufferPool> {
        &self.pool
    }

    fn start(&self, jobs: Vec<Job>) {
        if let Err(mpsc::SendError(ProgressCommand::Start(jobs))) =
            self.commands.send(ProgressCommand::Start(jobs))
            && !self.aborted.load(Ordering::Acquire)
        {
            refuse(jobs, &self.failure(STOPPED.to_owned()));
        }
    }

    fn split(&self, job: Job, _part: Arc<Group>, _part_id: GroupId) {
        // A group has no state other than its id, which every message contains.
        self.start(vec![job]);
    }

    fn missing(&self, group: GroupId, sequence: u64) -> Option<Vec<usize>> {
        let (reply, answer) = mpsc::channel();
        self.submit(ProgressCommand::Missing(CallId { group, sequence }, reply))
            .ok()?;
        answer.recv_timeout(QUERY_TIMEOUT).ok()?
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        // If the thread has ended, there is nothing to abort.
        let _ = self.commands.send(ProgressCommand::Abort);
    }

    fn close(&self, deadline: Duration) -> Result<(), CommError> {
        let (reply, answer) = mpsc::channel();
        self.submit(ProgressCommand::Close(reply))?;
        self.reply_within(deadline, &answer, || {
            format!(
                "the world is not closed after {:.1} s: {}",
                deadline.as_secs_f64(),
                self.close_blocker()
            )
        })?;
        let thread = self.thread.lock().take();
        // Panics of the thread were converted into errors.
        thread.map_or(Ok(()), |thread| thread.join().or(Ok(())))
    }
}

impl fmt::Debug for P2pCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "P2pCollectives({}, rank {} of {})",
            self.engine, self.rank, self.size
        )
    }
}
