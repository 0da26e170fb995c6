//! What one rank remembers of its run: its recent calls, and the step it is in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::Signature;
use super::communicator::Group;
use super::log::{CallLog, CallRecord, Position};

/// How long a rank waits in a call for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Deadlines {
    /// In the first call over a group, and in all calls of the first step.
    pub first: Duration,
    /// In all others.
    pub then: Duration,
}

/// The journal of one rank, shared by all its communicators.
#[derive(Debug)]
pub(super) struct Journal {
    began: Instant,
    deadlines: Deadlines,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    calls: CallLog,
    step: Option<u64>,
    steps_begun: u64,
}

impl Journal {
    /// The journal of a rank whose world began at `began`.
    pub fn new(began: Instant, deadlines: Deadlines) -> Arc<Self> {
        Arc::new(Self {
            began,
            deadlines,
            pages: Mutex::default(),
        })
    }

    /// Notes that a step begins.
    pub fn begin_step(&self, step: u64) {
        let mut pages = self.pages();
        pages.step = Some(step);
        pages.steps_begun += 1;
    }

    /// Notes a call and returns the key of its entry.
    pub fn start(&self, sequence: u64, group: &Arc<Group>, signature: &Arc<Signature>) -> u64 {
        let now = self.began.elapsed();
        let mut pages = self.pages();
        let step = pages.step;
        pages
            .calls
            .start(sequence, group, Arc::clone(signature), step, now)
    }

    /// Notes that the rank waits in a call.
    pub fn block(&self, key: u64) {
        self.pages().calls.block(key);
    }

    /// Notes that a call has its result.
    pub fn complete(&self, key: u64) {
        let now = self.began.elapsed();
        self.pages().calls.complete(key, now);
    }

    /// The recent calls, the oldest first.
    pub fn records(&self) -> Vec<CallRecord> {
        self.pages().calls.records()
    }

    /// Where the rank stands.
    pub fn position(&self) -> Position {
        self.pages().calls.position()
    }

    /// What the rank called as collective `sequence` of a group, if that is among the recent calls.
    pub fn call_of(&self, group: &Group, sequence: u64) -> Option<String> {
        self.pages().calls.call_of(group, sequence)
    }

    /// How long the rank waits in call `sequence` of a group.
    pub fn deadline(&self, sequence: u64) -> Duration {
        match sequence == 0 || self.pages().steps_begun == 1 {
            true => self.deadlines.first,
            false => self.deadlines.then,
        }
    }

    /// No code that can panic leaves the pages half written.
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, ReduceOp};

    #[test]
    fn the_first_step_and_the_first_call_have_a_deadline_of_their_own() {
        let [first, then] = [300, 100].map(Duration::from_secs);
        let journal = Journal::new(Instant::now(), Deadlines { first, then });
        assert_eq!((journal.deadline(0), journal.deadline(7)), (first, then));
        journal.begin_step(0);
        assert_eq!(journal.deadline(7), first);
        journal.begin_step(1);
        assert_eq!((journal.deadline(0), journal.deadline(7)), (first, then));
    }

    #[test]
    fn a_call_is_found_by_its_number_and_says_its_step() {
        let second = Duration::from_secs(1);
        let deadlines = Deadlines {
            first: second,
            then: second,
        };
        let journal = Journal::new(Instant::now(), deadlines);
        let group = Arc::new(Group::new("data", vec![0, 2], 1));
        let call = |len| {
            let call = Call::AllReduce(ReduceOp::Sum);
            Arc::new(Signature::new(call, &vec![0f32; len].into()))
        };
        journal.start(0, &group, &call(3));
        journal.begin_step(41);
        let key = journal.start(1, &group, &call(4));
        let found = journal.call_of(&group, 1);
        assert_eq!(found.as_deref(), Some("all_reduce(sum) of 4 f32"));
        assert_eq!(journal.call_of(&group, 2), None);
        let other = Group::new("data", vec![0, 3], 0);
        assert_eq!(journal.call_of(&other, 1), None);
        journal.block(key);
        let place = "call 1 all_reduce(sum) of 4 f32 over data [0, 2] in step 41";
        assert_eq!(journal.position(), Position::At(place.into()));
        assert_eq!(journal.records()[1].step, Some(41));
    }
}
