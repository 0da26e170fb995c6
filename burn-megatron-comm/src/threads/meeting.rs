//! Where the members of a group meet: open collectives, mailboxes, and who waits.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use super::Visit;
use super::gathered::{Arrival, Gathered};
use super::mailbox::Mailbox;
use super::state::{WorldState, lock};
use crate::buffer::Buffer;
use crate::communicator::Group;
use crate::error::CommError;
use crate::pool::Lent;

/// What the members of one group share.
#[derive(Debug)]
pub(super) struct Meeting {
    name: String,
    ranks: Vec<usize>,
    world: Arc<WorldState>,
    table: Mutex<Table>,
    /// One per member, so that a message wakes its receiver alone.
    bells: Vec<Condvar>,
}

#[derive(Debug)]
pub(super) struct Table {
    /// Collectives that some member has not come to yet, by their number.
    open: BTreeMap<u64, Open>,
    /// By sender and receiver.
    pub mail: HashMap<(usize, usize), Mailbox>,
    /// The number of threads that wait for each bell.
    waiting: Vec<usize>,
}

#[derive(Debug)]
struct Open {
    slot: Arc<Slot>,
    arrivals: Vec<Option<Arrival>>,
    arrived: usize,
}

/// The outcome of one collective. Only open collectives and handles hold it, so nothing of it is left
/// when both are gone.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub gathered: OnceLock<Gathered>,
    mismatch: OnceLock<CommError>,
}

impl Meeting {
    pub fn new(name: &str, ranks: Vec<usize>, world: &Arc<WorldState>) -> Arc<Self> {
        let table = Table {
            open: BTreeMap::new(),
            mail: HashMap::new(),
            waiting: vec![0; ranks.len()],
        };
        let meeting = Arc::new(Self {
            name: name.to_owned(),
            bells: ranks.iter().map(|_| Condvar::new()).collect(),
            ranks,
            world: Arc::clone(world),
            table: Mutex::new(table),
        });
        world.register(&meeting);
        meeting
    }

    pub fn world(&self) -> &Arc<WorldState> {
        &self.world
    }

    pub fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    /// The group as seen from one member.
    pub fn group(&self, index: usize) -> Group {
        Group::new(self.name.clone(), self.ranks.clone(), index)
    }

    /// Gives a member's part to a collective and compares it with the parts that are there.
    pub fn deposit(&self, visit: &Visit, input: Buffer) -> Result<Arc<Slot>, CommError> {
        let mut table = lock(&self.table);
        let open = table
            .open
            .entry(visit.sequence)
            .or_insert_with(|| Open::new(self.ranks.len()));
        let slot = Arc::clone(&open.slot);
        if slot.mismatch.get().is_none()
            && let Some(mismatch) = open.mismatch(visit)
        {
            let _ = slot.mismatch.set(mismatch);
            self.ring_all(&table);
        }
        if table.arrive(visit, input) {
            self.close(&mut table, visit.sequence, &slot);
        }
        drop(table);
        match slot.mismatch.get() {
            Some(mismatch) => Err(mismatch.clone()),
            // A collective that is complete is still worth its result.
            None if slot.gathered.get().is_some() => Ok(slot),
            None => self.world.check().map(|()| slot),
        }
    }

    fn close(&self, table: &mut Table, sequence: u64, slot: &Slot) {
        let open = table.open.remove(&sequence);
        let arrivals = open
            .into_iter()
            .flat_map(|open| open.arrivals)
            .flatten()
            .collect();
        if slot.mismatch.get().is_none() {
            let _ = slot.gathered.set(Gathered::new(arrivals, &self.world));
        }
        self.ring_all(table);
    }

    /// Blocks until all members have come to a collective.
    pub fn await_all(&self, visit: &Visit, slot: &Slot) -> Result<(), CommError> {
        if slot.gathered.get().is_some() {
            return Ok(());
        }
        self.block_until(visit, |table| {
            if slot.gathered.get().is_some() {
                return Ok(Ok(()));
            }
            match slot.mismatch.get() {
                Some(mismatch) => Ok(Err(mismatch.clone())),
                None => Err(table.missing(visit.sequence)),
            }
        })
    }

    /// Blocks until `poll` gives a result; until then it gives the indices of the missing members.
    pub fn block_until<R>(
        &self,
        visit: &Visit,
        mut poll: impl FnMut(&mut Table) -> Result<Result<R, CommError>, Vec<usize>>,
    ) -> Result<R, CommError> {
        let (began, own) = (Instant::now(), visit.group.index());
        let mut table = lock(&self.table);
        loop {
            let missing: Vec<usize> = match poll(&mut table) {
                Ok(result) => return result,
                Err(missing) => missing.into_iter().map(|index| self.ranks[index]).collect(),
            };
            self.check_peers(visit, &missing)?;
            let waited = began.elapsed();
            let left = visit.patience().saturating_sub(waited);
            if left.is_zero() {
                return Err(visit.deadline(missing, waited));
            }
            table.waiting[own] += 1;
            (table, _) = self.bells[own]
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner);
            table.waiting[own] -= 1;
        }
    }

    /// Fails if a rank of the world has failed or a missing one will never come.
    fn check_peers(&self, visit: &Visit, missing: &[usize]) -> Result<(), CommError> {
        self.world.check()?;
        match missing.iter().find(|rank| self.world.has_returned(**rank)) {
            None => Ok(()),
            Some(rank) => Err(CommError::PeerFinished {
                rank: *rank,
                group: visit.group.to_string(),
                sequence: visit.sequence,
                call: visit.describe(),
            }),
        }
    }

    /// Runs `change` on the table and wakes one member if it waits.
    pub fn change<R>(&self, member: usize, change: impl FnOnce(&mut Table) -> R) -> R {
        let mut table = lock(&self.table);
        let result = change(&mut table);
        self.ring(&table, member);
        result
    }

    pub fn wake_all(&self) {
        self.ring_all(&lock(&self.table));
    }

    fn ring_all(&self, table: &Table) {
        (0..self.bells.len()).for_each(|member| self.ring(table, member));
    }

    fn ring(&self, table: &Table, member: usize) {
        if table.waiting[member] > 0 {
            self.bells[member].notify_all();
        }
    }
}

impl Table {
    /// Puts a member's part down; whether it was the last one.
    fn arrive(&mut self, visit: &Visit, input: Buffer) -> bool {
        let Some(open) = self.open.get_mut(&visit.sequence) else {
            return false;
        };
        let signature = Arc::clone(&visit.signature);
        let input = Lent::new(input, visit.pool());
        open.arrivals[visit.group.index()] = Some(Arrival { signature, input });
        open.arrived += 1;
        open.arrived == open.arrivals.len()
    }

    /// The members that have not come to a collective, by index.
    fn missing(&self, sequence: u64) -> Vec<usize> {
        let Some(open) = self.open.get(&sequence) else {
            return Vec::new();
        };
        let absent = open
            .arrivals
            .iter()
            .enumerate()
            .filter(|(_, arrival)| arrival.is_none());
        absent.map(|(index, _)| index).collect()
    }
}

impl Open {
    fn new(size: usize) -> Self {
        Self {
            slot: Arc::default(),
            arrivals: (0..size).map(|_| None).collect(),
            arrived: 0,
        }
    }

    /// The first disagreement of a newcomer with those who are there.
    fn mismatch(&self, visit: &Visit) -> Option<CommError> {
        let own = visit.group.index();
        let came = self.arrivals.iter().enumerate();
        let came = came.filter_map(|(index, arrival)| Some((index, &arrival.as_ref()?.signature)));
        // Equality with one is equality with all, except where each pair has counts of its own.
        let compared = if visit.signature.is_pairwise() {
            usize::MAX
        } else {
            1
        };
        came.take(compared).find_map(|(index, signature)| {
            let reason = signature.disagreement(index, &visit.signature, own, &visit.group)?;
            Some(CommError::Mismatch {
                group: visit.group.to_string(),
                sequence: visit.sequence,
                first_rank: visit.group.ranks()[index],
                first_call: signature.describe(&visit.group),
                second_rank: visit.group.world_rank(),
                second_call: visit.describe(),
                reason,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::time::Duration;

    use super::*;
    use crate::call::{Call, Signature};
    use crate::journal::Deadlines;
    use crate::threads::ThreadCommunicator;
    use crate::{Communicator, DType, ReduceOp};

    fn pair() -> (Arc<Meeting>, [Arc<dyn Communicator>; 2]) {
        let patience = Duration::from_secs(5);
        let deadlines = Deadlines {
            first: patience,
            then: patience,
        };
        let state = WorldState::new(2, deadlines);
        let meeting = Meeting::new("world", vec![0, 1], &state);
        let ends = [0, 1].map(|index| ThreadCommunicator::join(&meeting, index));
        (meeting, ends)
    }

    fn open_slots(meeting: &Meeting) -> Vec<Weak<Slot>> {
        lock(&meeting.table)
            .open
            .values()
            .map(|open| Arc::downgrade(&open.slot))
            .collect()
    }

    #[test]
    fn dropped_handles_leave_no_collective_behind() {
        let (meeting, ends) = pair();
        drop(
            ends[0]
                .start_all_reduce(vec![1f32].into(), ReduceOp::Sum)
                .unwrap(),
        );
        let slots = open_slots(&meeting);
        assert_eq!(slots.len(), 1);
        let kept = ends[1]
            .start_all_reduce(vec![2f32].into(), ReduceOp::Sum)
            .unwrap();
        assert!(open_slots(&meeting).is_empty());
        assert_eq!(kept.wait().unwrap(), Buffer::from(vec![3f32]));
        assert!(slots[0].upgrade().is_none());
    }

    #[test]
    fn dropped_receives_leave_no_message_behind() {
        let (meeting, ends) = pair();
        let before = ends[1].start_receive(0, DType::U8, 1).unwrap();
        drop(before);
        for value in 0..4u8 {
            ends[0].send(vec![value].into(), 1).unwrap();
        }
        let after = ends[1].start_receive(0, DType::U8, 1).unwrap();
        let third = ends[1].start_receive(0, DType::U8, 1).unwrap();
        drop(after);
        assert_eq!(third.wait().unwrap(), Buffer::from(vec![2u8]));
        assert_eq!(
            ends[1].receive(0, DType::U8, 1).unwrap(),
            Buffer::from(vec![3u8])
        );
        let table = lock(&meeting.table);
        assert!(table.mail.values().all(Mailbox::is_empty));
    }

    #[test]
    fn a_mismatch_is_closed_when_all_have_come() {
        let (meeting, ends) = pair();
        let first = ends[0].start_all_gather(vec![1f32].into()).unwrap();
        assert!(ends[1].start_barrier().is_err());
        assert!(open_slots(&meeting).is_empty());
        assert!(matches!(first.wait(), Err(CommError::Mismatch { .. })));
    }

    #[test]
    fn the_description_names_the_world_ranks() {
        let group = Group::new("tensor", vec![4, 7], 0);
        let call = Signature::new(Call::Broadcast { root: 1 }, &vec![0f32; 3].into());
        assert_eq!(call.describe(&group), "broadcast of 3 f32 from rank 7");
        assert_eq!(group.to_string(), "tensor [4, 7]");
    }
}
