//! The state that all ranks of a world share: the first failure, the ranks that have returned, and the flight
//! recorders.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use super::group_state::GroupState;
use crate::error::{CommError, with_causes};
use crate::pool::BufferPool;
use crate::report::flight_recorder::{Deadlines, FlightRecorder};
use burn_megatron_rendezvous::{FailureReport, RankPosition, describe_ranks};

/// The first failure in a world.
#[derive(Debug)]
pub(crate) struct RankFailure {
    pub report: FailureReport,
    pub source: Box<dyn Error + Send + Sync>,
}

#[derive(Debug)]
pub(crate) struct WorldState {
    /// The error with which every call fails after the first failure.
    failed: OnceLock<CommError>,
    /// The first failure, which is returned to the program that runs the world.
    failure: Mutex<Option<RankFailure>>,
    returned: Vec<AtomicBool>,
    recorders: Vec<Arc<FlightRecorder>>,
    pools: Vec<Arc<BufferPool>>,
    groups: Mutex<Vec<Weak<GroupState>>>,
}

impl WorldState {
    pub fn new(size: usize, deadlines: Deadlines) -> Arc<Self> {
        let began = Instant::now();
        let recorder = |_| FlightRecorder::new(began, deadlines);
        Arc::new(Self {
            failed: OnceLock::new(),
            failure: Mutex::new(None),
            returned: (0..size).map(|_| AtomicBool::new(false)).collect(),
            recorders: (0..size).map(recorder).collect(),
            pools: (0..size).map(|_| Arc::default()).collect(),
            groups: Mutex::default(),
        })
    }

    /// Returns the flight recorder of one rank.
    pub fn recorder(&self, rank: usize) -> &Arc<FlightRecorder> {
        &self.recorders[rank]
    }

    /// Returns the buffer pool of one rank.
    pub fn pool(&self, rank: usize) -> &Arc<BufferPool> {
        &self.pools[rank]
    }

    /// Returns an error if any rank of the world has failed.
    pub fn check(&self) -> Result<(), CommError> {
        self.failed.get().cloned().map_or(Ok(()), Err)
    }

    pub fn has_returned(&self, rank: usize) -> bool {
        self.returned[rank].load(Ordering::Acquire)
    }

    /// Records that the closure of a rank has returned, and wakes all waiting ranks.
    pub fn set_returned(&self, rank: usize) {
        self.returned[rank].store(true, Ordering::Release);
        self.wake_all();
    }

    /// Records that a rank has failed, and wakes all waiting ranks. Later failures are ignored, because they are
    /// consequences of the first failure.
    pub fn fail(&self, rank: usize, source: Box<dyn Error + Send + Sync>) {
        let mut failure = self.failure.lock();
        if failure.is_some() {
            return;
        }
        let message = with_causes(&*source);
        let positions = self.positions(rank);
        let _ = self.failed.set(CommError::PeerFailed {
            rank,
            message: message.clone(),
        });
        let report = FailureReport {
            rank,
            message,
            positions,
        };
        *failure = Some(RankFailure { report, source });
        drop(failure);
        self.wake_all();
    }

    /// Returns the first failure. Later calls of this method return `None`.
    pub fn take_failure(&self) -> Option<RankFailure> {
        self.failure.lock().take()
    }

    /// Registers a group, so that its members are woken when a rank ends.
    pub(super) fn register(&self, group: &Arc<GroupState>) {
        let mut groups = self.groups.lock();
        groups.retain(|known| known.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    fn wake_all(&self) {
        // The list is copied first, because a split registers groups while it holds the lock of its own group.
        let groups: Vec<_> = self
            .groups
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        for group in groups {
            group.wake_all();
        }
    }

    fn positions(&self, failing: usize) -> String {
        let position = |rank: usize| {
            if rank == failing {
                RankPosition::Failed(Box::new(self.recorders[rank].position()))
            } else if self.has_returned(rank) {
                RankPosition::Returned
            } else {
                self.recorders[rank].position()
            }
        };
        let positions: Vec<RankPosition> = (0..self.recorders.len()).map(position).collect();
        describe_ranks(&positions)
    }
}
