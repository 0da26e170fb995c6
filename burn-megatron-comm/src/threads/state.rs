//! What all ranks of one run share: who failed first, who has returned, the call logs.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::meeting::Meeting;
use crate::error::{CommError, with_causes};
use crate::journal::{Deadlines, Journal};
use crate::log::{Position, verdict};
use crate::pool::BufferPool;

/// The first failure of a world.
#[derive(Debug)]
pub(crate) struct Failure {
    pub rank: usize,
    pub message: String,
    /// Who stood where when it happened.
    pub verdict: String,
    pub source: Box<dyn Error + Send + Sync>,
}

#[derive(Debug)]
pub(crate) struct WorldState {
    /// The first failure: its rank and message.
    failed: OnceLock<(usize, String)>,
    /// The same with all that the caller of the world is told.
    report: Mutex<Option<Failure>>,
    returned: Vec<AtomicBool>,
    journals: Vec<Arc<Journal>>,
    pools: Vec<Arc<BufferPool>>,
    meetings: Mutex<Vec<Weak<Meeting>>>,
}

/// Locks; no code that can panic leaves what it guards half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorldState {
    pub fn new(size: usize, deadlines: Deadlines) -> Arc<Self> {
        let began = Instant::now();
        let journal = |_| Journal::new(began, deadlines);
        Arc::new(Self {
            failed: OnceLock::new(),
            report: Mutex::new(None),
            returned: (0..size).map(|_| AtomicBool::new(false)).collect(),
            journals: (0..size).map(journal).collect(),
            pools: (0..size).map(|_| Arc::default()).collect(),
            meetings: Mutex::default(),
        })
    }

    /// The journal of one rank.
    pub fn journal(&self, rank: usize) -> &Arc<Journal> {
        &self.journals[rank]
    }

    /// The memory of one rank's calls.
    pub fn pool(&self, rank: usize) -> &Arc<BufferPool> {
        &self.pools[rank]
    }

    /// Fails once any rank has failed.
    pub fn check(&self) -> Result<(), CommError> {
        match self.failed.get() {
            None => Ok(()),
            Some((rank, message)) => Err(CommError::PeerFailed {
                rank: *rank,
                message: message.clone(),
            }),
        }
    }

    pub fn has_returned(&self, rank: usize) -> bool {
        self.returned[rank].load(Ordering::Acquire)
    }

    /// Notes that the closure of a rank has returned, and wakes those who may wait for it.
    pub fn set_returned(&self, rank: usize) {
        self.returned[rank].store(true, Ordering::Release);
        self.wake_all();
    }

    /// Notes that a rank has failed and wakes all others. Only the first failure counts: the later
    /// ones follow from it.
    pub fn fail(&self, rank: usize, source: Box<dyn Error + Send + Sync>) {
        let mut report = lock(&self.report);
        if report.is_some() {
            return;
        }
        let message = with_causes(&*source);
        let verdict = self.verdict(rank);
        let _ = self.failed.set((rank, message.clone()));
        *report = Some(Failure {
            rank,
            message,
            verdict,
            source,
        });
        drop(report);
        self.wake_all();
    }

    /// The first failure, once, after all ranks have ended.
    pub fn take_failure(&self) -> Option<Failure> {
        lock(&self.report).take()
    }

    /// Makes a meeting known, so that its members are woken when a rank ends.
    pub(super) fn register(&self, meeting: &Arc<Meeting>) {
        let mut meetings = lock(&self.meetings);
        meetings.retain(|known| known.strong_count() > 0);
        meetings.push(Arc::downgrade(meeting));
    }

    fn wake_all(&self) {
        // The list is copied first: a meeting registers new ones while it holds its own lock.
        let meetings: Vec<_> = lock(&self.meetings)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for meeting in meetings {
            meeting.wake_all();
        }
    }

    fn verdict(&self, failing: usize) -> String {
        let place = |rank: usize| {
            if rank == failing {
                Position::Failed(Box::new(self.journals[rank].position()))
            } else if self.has_returned(rank) {
                Position::Returned
            } else {
                self.journals[rank].position()
            }
        };
        let positions: Vec<Position> = (0..self.journals.len()).map(place).collect();
        verdict(&positions)
    }
}
