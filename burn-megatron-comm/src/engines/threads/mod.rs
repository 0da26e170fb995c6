//! The `threads` engine, whose ranks are threads of one process.
//!
//! The members of a group share a [`GroupState`]. In a collective, each member adds its input to the group state. After
//! all members have added their inputs, each member computes or takes its result. The [`WorldState`] contains the state
//! of the whole world: the ranks that have failed or returned, and the flight recorders.

mod completed;
mod group_state;
mod messages;
mod state;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, Signature, check_parts};
use crate::communicator::{Communicator, Group};
use crate::error::CommError;
use crate::pending::Pending;
use crate::pool::BufferPool;
use crate::report::recorded_call::{RecordedCall, start_span};
use group_state::{CollectiveOutcome, GroupState};
use messages::PendingReceive;
pub(crate) use state::{RankFailure, WorldState};

/// The communicator of one rank in a group.
pub(crate) struct ThreadCommunicator {
    group: Arc<Group>,
    state: Arc<GroupState>,
    /// The sequence number of the next collective. It is equal on all members, because they issue the same collectives.
    next: AtomicU64,
}

impl ThreadCommunicator {
    /// Creates the communicators of all ranks for the group of all ranks.
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

    fn begin(&self, sequence: u64, signature: Arc<Signature>) -> RecordedCall {
        let recorder = self.state.world().recorder(self.group.world_rank());
        RecordedCall::begin(recorder, &self.group, signature, sequence)
    }

    /// Runs a collective of a group of one rank. It does not wait for other ranks and does not use shared locks.
    fn run_locally(&self, signature: Arc<Signature>, input: Buffer) -> Result<Pending, CommError> {
        self.state.world().check()?;
        let output = match signature.operation {
            Operation::Call(Call::Barrier) => Buffer::empty(DType::U8),
            _ => input,
        };
        let call = self.begin(self.next_collective(), signature);
        Ok(Pending::new(move || call.run_wait(|| Ok(output))))
    }

    /// Joins a collective. If this fails, the call is recorded as the position of the rank.
    fn join_collective(
        &self,
        signature: Arc<Signature>,
        input: Buffer,
    ) -> Result<(RecordedCall, Arc<CollectiveOutcome>), CommError> {
        let call = self.begin(self.next_collective(), signature);
        let joined = self.state.contribute(&call, input);
        let outcome = joined.inspect_err(|_| call.mark_waiting())?;
        Ok((call, outcome))
    }

    fn run_collective(
        &self,
        signature: Arc<Signature>,
        input: Buffer,
    ) -> Result<Pending, CommError> {
        let (call, outcome) = self.join_collective(signature, input)?;
        let state = Arc::clone(&self.state);
        Ok(Pending::new(move || {
            call.run_wait(|| {
                state.await_all(&call, &outcome)?;
                Ok(completed::result(outcome, &call, state.pool(&call)))
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
        let call = self.begin(number, signature);
        self.state.deliver(from, to, number, input);
        call.complete();
        Ok(Pending::new(move || call.run_wait(|| Ok(empty))))
    }

    fn receive(&self, signature: Arc<Signature>, from: usize) -> Result<Pending, CommError> {
        self.state.world().check()?;
        let pending = PendingReceive::new(&self.state, from, self.group.index());
        let call = self.begin(pending.number(), signature);
        Ok(Pending::new(move || call.run_wait(|| pending.wait(&call))))
    }
}

impl Communicator for ThreadCommunicator {
    fn group(&self) -> &Group {
        &self.group
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        call.check(&self.group, &input)?;
        let signature = Arc::new(Signature::new(call.clone(), &input));
        let _span = start_span(&signature, &self.group);
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
        let (call, outcome) = self.join_collective(signature, Buffer::empty(DType::U8))?;
        call.run_wait(|| {
            self.state.await_all(&call, &outcome)?;
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
