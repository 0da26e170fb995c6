//! The engine whose ranks are threads of one process.
//!
//! The members of a group share a [`GroupState`]: each contributes its input of a call there and takes its
//! result once all have contributed. The state of the whole world (failed and returned ranks, flight
//! recorders) is the [`WorldState`].

mod completed;
mod group_state;
mod messages;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tracing::trace_span;

use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, Signature, check_parts};
use crate::communicator::{Communicator, Group};
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;
use crate::report::flight_recorder::FlightRecorder;
use group_state::GroupState;
pub(crate) use state::{RankFailure, WorldState};

/// One rank's communicator of a group.
pub(crate) struct ThreadCommunicator {
    group: Arc<Group>,
    state: Arc<GroupState>,
    /// The number of the next collective: equal on all members, as they issue the same collectives.
    next: AtomicU64,
}

impl ThreadCommunicator {
    /// The communicators of all ranks, over the group of all ranks.
    pub fn world(state: &Arc<WorldState>, size: usize) -> Vec<Arc<dyn Communicator>> {
        let group = GroupState::new("world", (0..size).collect(), state);
        (0..size).map(|rank| Self::join(&group, rank)).collect()
    }

    fn join(state: &Arc<GroupState>, index: usize) -> Arc<dyn Communicator> {
        Arc::new(Self {
            group: Arc::new(state.group(index)),
            state: Arc::clone(state),
            next: AtomicU64::new(0),
        })
    }

    fn next_collective(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn begin(&self, sequence: u64, signature: Arc<Signature>) -> ThreadCall {
        let world = self.state.world();
        let recorder = world.recorder(self.group.world_rank());
        let key = recorder.start(sequence, &self.group, &signature);
        let (state, group) = (Arc::clone(&self.state), Arc::clone(&self.group));
        ThreadCall {
            state,
            group,
            signature,
            sequence,
            key,
        }
    }

    /// A collective of a group of one: it waits for no rank and takes no shared lock.
    fn run_locally(&self, signature: Arc<Signature>, input: Buffer) -> Result<Pending, CommError> {
        self.state.world().check()?;
        let output = match signature.operation {
            Operation::Call(Call::Barrier) => Buffer::empty(DType::U8),
            _ => input,
        };
        let in_flight = self.begin(self.next_collective(), signature);
        Ok(Pending::new(move || in_flight.finish(|_| Ok(output))))
    }

    fn run_collective(
        &self,
        signature: Arc<Signature>,
        input: Buffer,
    ) -> Result<Pending, CommError> {
        let in_flight = self.begin(self.next_collective(), signature);
        let outcome =
            in_flight.run_start(|in_flight| in_flight.state.contribute(in_flight, input))?;
        Ok(Pending::new(move || {
            in_flight.finish(|in_flight| {
                in_flight.state.await_all(in_flight, &outcome)?;
                Ok(completed::result(outcome, in_flight))
            })
        }))
    }

    fn send(
        &self,
        signature: Arc<Signature>,
        to: usize,
        input: Buffer,
    ) -> Result<Pending, CommError> {
        self.state.world().check()?;
        let (from, empty) = (self.group.index(), Buffer::empty(input.dtype()));
        // The call is recorded first, so that a receive never completes before its send has started.
        let number = self.state.next_sent(from, to);
        let in_flight = self.begin(number, Arc::clone(&signature));
        self.state.deliver(from, to, number, input);
        in_flight.complete();
        Ok(Pending::new(move || in_flight.finish(|_| Ok(empty))))
    }

    fn receive(&self, signature: Arc<Signature>, from: usize) -> Result<Pending, CommError> {
        self.state.world().check()?;
        let pending = messages::PendingReceive::new(&self.state, from, self.group.index());
        let in_flight = self.begin(pending.number(), signature);
        Ok(Pending::new(move || {
            in_flight.finish(|in_flight| pending.wait(in_flight))
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
            _ if self.size() == 1 => self.run_locally(signature, input),
            _ => self.run_collective(signature, input),
        }
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        check_parts(&self.group, name, groups)?;
        let signature = Arc::new(Signature::split(name, groups));
        let in_flight = self.begin(self.next_collective(), signature);
        let outcome = in_flight.run_start(|in_flight| {
            in_flight
                .state
                .contribute(in_flight, Buffer::empty(DType::U8))
        })?;
        in_flight.run_wait(|in_flight| {
            in_flight.state.await_all(in_flight, &outcome)?;
            let (part, index) = completed::part(&outcome, self.group.world_rank());
            Ok(Self::join(part, index))
        })
    }

    fn begin_step(&self, step: u64) {
        let rank = self.group.world_rank();
        self.state.world().recorder(rank).begin_step(step);
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        let world = self.state.world();
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

/// A call of one rank, from its start to its completion.
pub(crate) struct ThreadCall {
    state: Arc<GroupState>,
    group: Arc<Group>,
    signature: Arc<Signature>,
    sequence: u64,
    /// The key of its entry in the flight recorder.
    key: u64,
}

impl ThreadCall {
    fn world(&self) -> &WorldState {
        self.state.world()
    }

    /// The buffer pool of this rank.
    fn pool(&self) -> &Arc<BufferPool> {
        self.world().pool(self.group.world_rank())
    }

    /// Runs the start of a call; if that fails, the call is recorded as the rank's position.
    fn run_start<R>(
        &self,
        start: impl FnOnce(&Self) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        start(self).inspect_err(|_| self.mark_waiting())
    }

    /// Runs the wait of a call.
    fn run_wait<R>(
        &self,
        wait: impl FnOnce(&Self) -> Result<R, CommError>,
    ) -> Result<R, CommError> {
        let _span = trace_span!(
            "collective.wait",
            op = self.signature.name(),
            group = self.group.name(),
            len = self.signature.len,
            dtype = self.signature.dtype.name(),
        )
        .entered();
        self.mark_waiting();
        wait(self).inspect(|_| self.complete())
    }

    fn finish(
        self,
        wait: impl FnOnce(&Self) -> Result<Buffer, CommError>,
    ) -> Result<Buffer, CommError> {
        self.run_wait(wait)
    }

    fn recorder(&self) -> &FlightRecorder {
        self.world().recorder(self.group.world_rank())
    }

    /// The deadline of this call.
    fn timeout(&self) -> Duration {
        self.recorder().deadline(self.sequence)
    }

    fn mark_waiting(&self) {
        self.recorder().mark_waiting(self.key);
    }

    fn complete(&self) {
        self.recorder().complete(self.key);
    }

    fn describe(&self) -> String {
        self.signature.describe(&self.group)
    }

    fn deadline_error(&self, missing: Vec<usize>, waited: Duration) -> CommError {
        let own = self.group.world_rank();
        let waiting = match self.signature.operation {
            Operation::Call(Call::Receive { .. }) => vec![own],
            _ => {
                let joined = self
                    .group
                    .ranks()
                    .iter()
                    .filter(|rank| !missing.contains(rank));
                joined.copied().collect()
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
