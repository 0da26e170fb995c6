//! The engine whose ranks are threads of one process.
//!
//! The members of a group share a [`Meeting`]: each deposits its part of a call there and fetches its
//! result when all have come. What the whole world shares (who failed, who returned, the logs) is the
//! [`WorldState`].

mod gathered;
mod mailbox;
mod meeting;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::trace_span;

use super::buffer::{Buffer, DType};
use super::call::{Call, Operation, Signature, check_parts};
use super::communicator::{Communicator, Group};
use super::error::CommError;
use super::journal::Journal;
use super::pending::Pending;
use super::pool::BufferPool;
use meeting::Meeting;
pub(super) use state::{Failure, WorldState};

/// One rank's end of a group.
pub(super) struct ThreadCommunicator {
    group: Arc<Group>,
    meeting: Arc<Meeting>,
    /// The number of the next collective; the members number alike because they call alike.
    next: AtomicU64,
}

impl ThreadCommunicator {
    /// Every rank's end of the group of all ranks.
    pub fn world(state: &Arc<WorldState>, size: usize) -> Vec<Arc<dyn Communicator>> {
        let meeting = Meeting::new("world", (0..size).collect(), state);
        (0..size).map(|rank| Self::join(&meeting, rank)).collect()
    }

    fn join(meeting: &Arc<Meeting>, index: usize) -> Arc<dyn Communicator> {
        Arc::new(Self {
            group: Arc::new(meeting.group(index)),
            meeting: Arc::clone(meeting),
            next: AtomicU64::new(0),
        })
    }

    fn next_collective(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn visit(&self, sequence: u64, signature: Arc<Signature>) -> Visit {
        let world = self.meeting.world();
        let journal = world.journal(self.group.world_rank());
        let key = journal.start(sequence, &self.group, &signature);
        let (meeting, group) = (Arc::clone(&self.meeting), Arc::clone(&self.group));
        Visit {
            meeting,
            group,
            signature,
            sequence,
            key,
        }
    }

    /// A group of one has nobody to wait for and takes no lock that another rank takes.
    fn alone(&self, signature: Arc<Signature>, input: Buffer) -> Result<Pending, CommError> {
        self.meeting.world().check()?;
        let output = match signature.operation {
            Operation::Call(Call::Barrier) => Buffer::empty(DType::U8),
            _ => input,
        };
        let visit = self.visit(self.next_collective(), signature);
        Ok(Pending::new(move || visit.finish(|_| Ok(output))))
    }

    fn meet(&self, signature: Arc<Signature>, input: Buffer) -> Result<Pending, CommError> {
        let visit = self.visit(self.next_collective(), signature);
        let slot = visit.opening(|visit| visit.meeting.deposit(visit, input))?;
        Ok(Pending::new(move || {
            visit.finish(|visit| {
                visit.meeting.await_all(visit, &slot)?;
                Ok(gathered::result(slot, visit))
            })
        }))
    }

    fn send(
        &self,
        signature: Arc<Signature>,
        to: usize,
        input: Buffer,
    ) -> Result<Pending, CommError> {
        self.meeting.world().check()?;
        let (from, empty) = (self.group.index(), Buffer::empty(input.dtype()));
        // The log entry comes first, so that the receipt is never older than the message.
        let number = self.meeting.next_sent(from, to);
        let visit = self.visit(number, Arc::clone(&signature));
        self.meeting.post(from, to, number, input);
        visit.complete();
        Ok(Pending::new(move || visit.finish(|_| Ok(empty))))
    }

    fn receive(&self, signature: Arc<Signature>, from: usize) -> Result<Pending, CommError> {
        self.meeting.world().check()?;
        let claim = mailbox::Claim::new(&self.meeting, from, self.group.index());
        let visit = self.visit(claim.number(), signature);
        Ok(Pending::new(move || {
            visit.finish(|visit| claim.collect(visit))
        }))
    }
}

impl Communicator for ThreadCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        call.check(&self.group, &input)?;
        let signature = Arc::new(Signature::new(call.clone(), &input));
        let _span = trace_span!(
            "collective.start",
            op = signature.name(),
            group = self.group.name(),
            len = signature.len,
            dtype = signature.dtype.name(),
        )
        .entered();
        match call {
            Call::Send { to } => self.send(signature, to, input),
            Call::Receive { from, .. } => self.receive(signature, from),
            _ if self.size() == 1 => self.alone(signature, input),
            _ => self.meet(signature, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        check_parts(&self.group, name, groups)?;
        let signature = Arc::new(Signature::split(name, groups));
        let visit = self.visit(self.next_collective(), signature);
        let slot = visit.opening(|visit| visit.meeting.deposit(visit, Buffer::empty(DType::U8)))?;
        visit.waiting(|visit| {
            visit.meeting.await_all(visit, &slot)?;
            let (part, index) = gathered::part(&slot, self.group.world_rank());
            Ok(Self::join(part, index))
        })
    }

    fn begin_step(&self, step: u64) {
        let rank = self.group.world_rank();
        self.meeting.world().journal(rank).begin_step(step);
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        let world = self.meeting.world();
        Some(world.pool(self.group.world_rank()))
    }
}

impl fmt::Debug for ThreadCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ThreadCommunicator({}, index {})",
            self.group,
            self.group.index()
        )
    }
}

/// One rank's part in one call, from its start to its end.
pub(super) struct Visit {
    meeting: Arc<Meeting>,
    group: Arc<Group>,
    signature: Arc<Signature>,
    sequence: u64,
    /// The key of the entry in the rank's log.
    key: u64,
}

impl Visit {
    fn world(&self) -> &WorldState {
        self.meeting.world()
    }

    /// The memory of this rank's calls.
    fn pool(&self) -> &Arc<BufferPool> {
        self.world().pool(self.group.world_rank())
    }

    /// Runs the start of a call; if it fails, the rank stands there.
    fn opening<R>(
        &self,
        start: impl FnOnce(&Self) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        start(self).inspect_err(|_| self.block())
    }

    /// Runs the wait of a call.
    fn waiting<R>(&self, wait: impl FnOnce(&Self) -> Result<R, CommError>) -> Result<R, CommError> {
        let _span = trace_span!(
            "collective.wait",
            op = self.signature.name(),
            group = self.group.name(),
            len = self.signature.len,
            dtype = self.signature.dtype.name(),
        )
        .entered();
        self.block();
        wait(self).inspect(|_| self.complete())
    }

    fn finish(
        self,
        wait: impl FnOnce(&Self) -> Result<Buffer, CommError>,
    ) -> Result<Buffer, CommError> {
        self.waiting(wait)
    }

    fn journal(&self) -> &Journal {
        self.world().journal(self.group.world_rank())
    }

    /// How long this rank waits for the others.
    fn patience(&self) -> Duration {
        self.journal().deadline(self.sequence)
    }

    fn block(&self) {
        self.journal().block(self.key);
    }

    fn complete(&self) {
        self.journal().complete(self.key);
    }

    fn describe(&self) -> String {
        self.signature.describe(&self.group)
    }

    fn deadline(&self, missing: Vec<usize>, waited: Duration) -> CommError {
        let own = self.group.world_rank();
        let waiting = match self.signature.operation {
            Operation::Call(Call::Receive { .. }) => vec![own],
            _ => {
                let came = self
                    .group
                    .ranks()
                    .iter()
                    .filter(|rank| !missing.contains(rank));
                came.copied().collect()
            }
        };
        let (group, call) = (self.group.to_string(), self.describe());
        CommError::Deadline {
            group,
            sequence: self.sequence,
            call,
            missing,
            waiting,
            waited,
        }
    }
}
