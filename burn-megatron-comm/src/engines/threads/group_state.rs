//! The state that the members of a group share: open collectives, message queues, and members that wait.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use super::completed::{CompletedCollective, Contribution};
use super::messages::MessageQueue;
use super::state::WorldState;
use crate::buffer::Buffer;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::{BufferPool, PooledBuffer};
use crate::report::recorded_call::RecordedCall;

/// The state that the members of one group share.
#[derive(Debug)]
pub(super) struct GroupState {
    name: String,
    ranks: Vec<usize>,
    world: Arc<WorldState>,
    calls: Mutex<GroupCalls>,
    /// One condition variable per member, so that a message wakes only its receiver.
    condvars: Vec<Condvar>,
}

#[derive(Debug)]
pub(super) struct GroupCalls {
    /// The collectives that some members have not joined yet, keyed by sequence number.
    open: BTreeMap<u64, OpenCollective>,
    /// The message queues, keyed by sender and receiver.
    pub messages: HashMap<(usize, usize), MessageQueue>,
    /// The number of threads that wait on each condition variable.
    waiting: Vec<usize>,
}

#[derive(Debug)]
struct OpenCollective {
    outcome: Arc<CollectiveOutcome>,
    contributions: Vec<Option<Contribution>>,
    joined: usize,
}

/// The outcome of one collective, which is shared by the members.
#[derive(Debug, Default)]
pub(super) struct CollectiveOutcome {
    pub completed: OnceLock<CompletedCollective>,
    mismatch: OnceLock<CommError>,
}

impl GroupState {
    pub fn new(name: &str, ranks: Vec<usize>, world: &Arc<WorldState>) -> Arc<Self> {
        let calls = GroupCalls {
            open: BTreeMap::new(),
            messages: HashMap::new(),
            waiting: vec![0; ranks.len()],
        };
        let group = Arc::new(Self {
            name: name.to_owned(),
            condvars: ranks.iter().map(|_| Condvar::new()).collect(),
            ranks,
            world: Arc::clone(world),
            calls: Mutex::new(calls),
        });
        world.register(&group);
        group
    }

    pub fn world(&self) -> &Arc<WorldState> {
        &self.world
    }

    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// Returns the buffer pool of the rank that issued a call.
    pub fn pool(&self, call: &RecordedCall) -> &Arc<BufferPool> {
        self.world.pool(call.group.world_rank())
    }

    /// Returns the group from the view of the member with index `index`.
    pub fn group(&self, index: usize) -> Group {
        Group::new(self.name.clone(), self.ranks.clone(), index)
    }

    /// Adds the input of a member to a collective. Compares the call of the member with the calls of the other members.
    pub fn contribute(
        &self,
        call: &RecordedCall,
        input: Buffer,
    ) -> Result<Arc<CollectiveOutcome>, CommError> {
        let mut calls = self.calls.lock();
        let open = calls
            .open
            .entry(call.sequence)
            .or_insert_with(|| OpenCollective::new(self.ranks.len()));
        let outcome = Arc::clone(&open.outcome);
        if outcome.mismatch.get().is_none()
            && let Some(mismatch) = open.mismatch(call)
        {
            let _ = outcome.mismatch.set(mismatch);
            self.notify_all(&calls);
        }
        if calls.join(call, input, self.pool(call)) {
            self.close(&mut calls, call.sequence, &outcome);
        }
        drop(calls);
        match outcome.mismatch.get() {
            Some(mismatch) => Err(mismatch.clone()),
            // A complete collective has a result even if the world has failed.
            None if outcome.completed.get().is_some() => Ok(outcome),
            None => self.world.check().map(|()| outcome),
        }
    }

    fn close(&self, calls: &mut GroupCalls, sequence: u64, outcome: &CollectiveOutcome) {
        let open = calls.open.remove(&sequence);
        let contributions = open
            .into_iter()
            .flat_map(|open| open.contributions)
            .flatten()
            .collect();
        if outcome.mismatch.get().is_none() {
            let _ = outcome
                .completed
                .set(CompletedCollective::new(contributions, &self.world));
        }
        self.notify_all(calls);
    }

    /// Blocks until all members have joined a collective.
    pub fn await_all(
        &self,
        call: &RecordedCall,
        outcome: &CollectiveOutcome,
    ) -> Result<(), CommError> {
        if outcome.completed.get().is_some() {
            return Ok(());
        }
        self.block_until(call, |calls| {
            if outcome.completed.get().is_some() {
                return Ok(Ok(()));
            }
            match outcome.mismatch.get() {
                Some(mismatch) => Ok(Err(mismatch.clone())),
                None => Err(calls.missing(call.sequence)),
            }
        })
    }

    /// Blocks until `poll` returns `Ok`. While it must wait, `poll` returns `Err` with the indices of the missing
    /// members.
    pub fn block_until<R>(
        &self,
        call: &RecordedCall,
        mut poll: impl FnMut(&mut GroupCalls) -> Result<Result<R, CommError>, Vec<usize>>,
    ) -> Result<R, CommError> {
        let (began, own) = (Instant::now(), call.group.index());
        let mut calls = self.calls.lock();
        loop {
            let missing: Vec<usize> = match poll(&mut calls) {
                Ok(result) => return result,
                Err(missing) => missing.into_iter().map(|index| self.ranks[index]).collect(),
            };
            self.check_peers(call, &missing)?;
            let waited = began.elapsed();
            let left = call.timeout().saturating_sub(waited);
            if left.is_zero() {
                return Err(call.deadline_error(missing, waited));
            }
            calls.waiting[own] += 1;
            self.condvars[own].wait_for(&mut calls, left);
            calls.waiting[own] -= 1;
        }
    }

    /// Returns an error if any rank of the world has failed, or if a missing member has returned.
    fn check_peers(&self, call: &RecordedCall, missing: &[usize]) -> Result<(), CommError> {
        self.world.check()?;
        let returned = missing.iter().find(|rank| self.world.has_returned(**rank));
        returned.map_or(Ok(()), |rank| Err(call.peer_finished(*rank)))
    }

    /// Changes the calls of the group with `change`, and wakes one member if it is waiting.
    pub fn change<R>(&self, member: usize, change: impl FnOnce(&mut GroupCalls) -> R) -> R {
        let mut calls = self.calls.lock();
        let result = change(&mut calls);
        self.notify(&calls, member);
        result
    }

    pub fn wake_all(&self) {
        self.notify_all(&self.calls.lock());
    }

    fn notify_all(&self, calls: &GroupCalls) {
        (0..self.condvars.len()).for_each(|member| self.notify(calls, member));
    }

    fn notify(&self, calls: &GroupCalls, member: usize) {
        if calls.waiting[member] > 0 {
            self.condvars[member].notify_all();
        }
    }
}

impl GroupCalls {
    /// Adds the input of a member to an open collective. Returns whether this was the last missing input.
    fn join(&mut self, call: &RecordedCall, input: Buffer, pool: &Arc<BufferPool>) -> bool {
        let Some(open) = self.open.get_mut(&call.sequence) else {
            return false;
        };
        let signature = Arc::clone(&call.signature);
        let input = PooledBuffer::new(input, pool);
        open.contributions[call.group.index()] = Some(Contribution { signature, input });
        open.joined += 1;
        open.joined == open.contributions.len()
    }

    /// Returns the indices of the members that have not joined the collective.
    fn missing(&self, sequence: u64) -> Vec<usize> {
        let Some(open) = self.open.get(&sequence) else {
            return Vec::new();
        };
        let absent = open
            .contributions
            .iter()
            .enumerate()
            .filter(|(_, contribution)| contribution.is_none());
        absent.map(|(index, _)| index).collect()
    }
}

impl OpenCollective {
    fn new(size: usize) -> Self {
        Self {
            outcome: Arc::default(),
            contributions: (0..size).map(|_| None).collect(),
            joined: 0,
        }
    }

    /// Returns the first mismatch between this call and the calls of the members that have joined.
    fn mismatch(&self, call: &RecordedCall) -> Option<CommError> {
        let own = call.group.index();
        let joined = self.contributions.iter().enumerate();
        let signatures = joined
            .filter_map(|(index, contribution)| Some((index, &contribution.as_ref()?.signature)));
        // A call that matches one member matches all members, except for the per-pair counts of an all_to_all.
        let compared = if call.signature.is_pairwise() {
            usize::MAX
        } else {
            1
        };
        signatures.take(compared).find_map(|(index, signature)| {
            let reason = signature.disagreement(index, &call.signature, own, &call.group)?;
            let theirs = signature.describe(&call.group);
            Some(call.mismatch(call.group.ranks()[index], theirs, reason))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Duration;

    use super::*;
    use crate::call::{Call, Signature};
    use crate::engines::threads::ThreadCommunicator;
    use crate::report::flight_recorder::Deadlines;
    use crate::{Communicator, DType, ReduceOp};

    fn pair() -> (Arc<GroupState>, [Arc<dyn Communicator>; 2]) {
        let timeout = Duration::from_secs(5);
        let deadlines = Deadlines {
            first: timeout,
            later: timeout,
        };
        let state = WorldState::new(2, deadlines);
        let group = GroupState::new("world", vec![0, 1], &state);
        let comms = [0, 1].map(|index| ThreadCommunicator::join(&group, index));
        (group, comms)
    }

    fn open_outcomes(group: &GroupState) -> Vec<Weak<CollectiveOutcome>> {
        group
            .calls
            .lock()
            .open
            .values()
            .map(|open| Arc::downgrade(&open.outcome))
            .collect()
    }

    #[test]
    fn dropped_handles_leave_no_collective_behind() {
        let (group, comms) = pair();
        drop(
            comms[0]
                .start_all_reduce(vec![1f32].into(), ReduceOp::Sum)
                .unwrap(),
        );
        let outcomes = open_outcomes(&group);
        assert_eq!(outcomes.len(), 1);
        let kept = comms[1]
            .start_all_reduce(vec![2f32].into(), ReduceOp::Sum)
            .unwrap();
        assert!(open_outcomes(&group).is_empty());
        assert_eq!(kept.wait().unwrap(), Buffer::from(vec![3f32]));
        assert!(outcomes[0].upgrade().is_none());
    }

    #[test]
    fn dropped_receives_leave_no_message_behind() {
        let (group, comms) = pair();
        let before = comms[1].start_receive(0, DType::U8, 1).unwrap();
        drop(before);
        for value in 0..4u8 {
            comms[0].send(vec![value].into(), 1).unwrap();
        }
        let after = comms[1].start_receive(0, DType::U8, 1).unwrap();
        let third = comms[1].start_receive(0, DType::U8, 1).unwrap();
        drop(after);
        assert_eq!(third.wait().unwrap(), Buffer::from(vec![2u8]));
        assert_eq!(
            comms[1].receive(0, DType::U8, 1).unwrap(),
            Buffer::from(vec![3u8])
        );
        let calls = group.calls.lock();
        assert!(calls.messages.values().all(MessageQueue::is_empty));
    }

    #[test]
    fn a_mismatch_is_closed_when_all_have_joined() {
        let (group, comms) = pair();
        let first = comms[0].start_all_gather(vec![1f32].into()).unwrap();
        assert!(comms[1].start_barrier().is_err());
        assert!(open_outcomes(&group).is_empty());
        assert!(matches!(first.wait(), Err(CommError::Mismatch { .. })));
    }

    #[test]
    fn the_description_names_the_world_ranks() {
        let group = Group::new("tensor", vec![4, 7], 0);
        let call = Signature::new(Call::Broadcast { root: 1 }, &vec![0f32; 3].into());
        insta::assert_snapshot!(call.describe(&group), @"broadcast of 3 f32 from rank 7");
        assert_eq!(group.to_string(), "tensor [4, 7]");
    }
}
