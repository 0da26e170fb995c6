//! The flight recorder of one rank: its recent calls and its current step.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::call::Signature;
use crate::communicator::Group;
use crate::report::call_log::{CallLog, CallRecord, RankPosition};

/// The time that a rank waits for the others in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deadlines {
    /// In the first call over a group, and in all calls of the first step.
    pub first: Duration,
    /// In all later calls.
    pub later: Duration,
}

/// Records the calls of one rank; shared by all its communicators.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    began: Instant,
    deadlines: Deadlines,
    state: Mutex<RecorderState>,
}

#[derive(Debug, Default)]
struct RecorderState {
    calls: CallLog,
    step: Option<u64>,
    steps_begun: u64,
}

impl FlightRecorder {
    /// A recorder whose timestamps count from `began`.
    pub fn new(began: Instant, deadlines: Deadlines) -> Arc<Self> {
        Arc::new(Self {
            began,
            deadlines,
            state: Mutex::default(),
        })
    }

    /// The time since `began`.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Records the start of a step.
    pub fn begin_step(&self, step: u64) {
        let mut state = self.state.lock();
        state.step = Some(step);
        state.steps_begun += 1;
    }

    /// Records the start of a call and returns the key of its entry.
    pub fn start(&self, sequence: u64, group: &Arc<Group>, signature: &Arc<Signature>) -> u64 {
        let now = self.elapsed();
        let mut state = self.state.lock();
        let step = state.step;
        state
            .calls
            .start(sequence, group, Arc::clone(signature), step, now)
    }

    /// Records that the rank waits in a call.
    pub fn mark_waiting(&self, key: u64) {
        self.state.lock().calls.mark_waiting(key);
    }

    /// Records that a call has completed.
    pub fn complete(&self, key: u64) {
        let now = self.elapsed();
        self.state.lock().calls.complete(key, now);
    }

    /// The recent calls, the oldest first.
    pub fn records(&self) -> Vec<CallRecord> {
        self.state.lock().calls.records()
    }

    /// Returns the position of the rank, for a failure report.
    pub fn position(&self) -> RankPosition {
        self.state.lock().calls.position()
    }

    /// The rank's call with number `sequence` on a group, if it is among the recent calls.
    pub fn call_of(&self, group: &Group, sequence: u64) -> Option<String> {
        self.state.lock().calls.call_of(group, sequence)
    }

    /// The deadline of call `sequence` of a group.
    pub fn deadline(&self, sequence: u64) -> Duration {
        if sequence == 0 || self.state.lock().steps_begun == 1 {
            self.deadlines.first
        } else {
            self.deadlines.later
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Call, ReduceOp};

    #[test]
    fn the_first_step_and_the_first_call_have_a_deadline_of_their_own() {
        let [first, later] = [300, 100].map(Duration::from_secs);
        let recorder = FlightRecorder::new(Instant::now(), Deadlines { first, later });
        assert_eq!((recorder.deadline(0), recorder.deadline(7)), (first, later));
        recorder.begin_step(0);
        assert_eq!(recorder.deadline(7), first);
        recorder.begin_step(1);
        assert_eq!((recorder.deadline(0), recorder.deadline(7)), (first, later));
    }

    #[test]
    fn a_call_is_found_by_its_number_and_records_its_step() {
        let second = Duration::from_secs(1);
        let deadlines = Deadlines {
            first: second,
            later: second,
        };
        let recorder = FlightRecorder::new(Instant::now(), deadlines);
        let group = Arc::new(Group::new("data", vec![0, 2], 1));
        let call = |len| {
            let call = Call::AllReduce(ReduceOp::Sum);
            Arc::new(Signature::new(call, &vec![0f32; len].into()))
        };
        recorder.start(0, &group, &call(3));
        recorder.begin_step(41);
        let key = recorder.start(1, &group, &call(4));
        let found = recorder.call_of(&group, 1);
        assert_eq!(found.as_deref(), Some("all_reduce(sum) of 4 f32"));
        assert_eq!(recorder.call_of(&group, 2), None);
        let other = Group::new("data", vec![0, 3], 0);
        assert_eq!(recorder.call_of(&other, 1), None);
        recorder.mark_waiting(key);
        let expected = "call 1 all_reduce(sum) of 4 f32 over data [0, 2] in step 41";
        assert_eq!(recorder.position(), RankPosition::Waiting(expected.into()));
        assert_eq!(recorder.records()[1].step, Some(41));
    }
}
