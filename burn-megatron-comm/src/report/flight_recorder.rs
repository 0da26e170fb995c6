//! The flight recorder of one rank, which records its recent calls and its current step.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::call::Signature;
use crate::communicator::Group;
use crate::report::call_log::{CALLS_KEPT, CallRecord};
use burn_megatron_rendezvous::{RankPosition, list_ranks};

/// The timeouts of calls: the time for which a rank waits for other ranks in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deadlines {
    /// The timeout of the first call on a group, and of all calls in the first step.
    pub first: Duration,
    /// The timeout of all later calls.
    pub later: Duration,
}

/// A recorder of the calls of one rank. All communicators of the rank share it.
#[derive(Debug)]
pub(crate) struct FlightRecorder {
    began: Instant,
    deadlines: Deadlines,
    state: Mutex<RecorderState>,
}

#[derive(Debug, Default)]
struct RecorderState {
    /// The ring buffer of recent calls.
    entries: VecDeque<CallEntry>,
    /// The number of entries that were dropped from the ring buffer.
    dropped: u64,
    /// The calls in which the rank waits or has failed. The last of these calls is the position of the rank.
    waiting: Vec<u64>,
    step: Option<u64>,
    steps_begun: u64,
}

#[derive(Debug)]
struct CallEntry {
    sequence: u64,
    group: Arc<Group>,
    signature: Arc<Signature>,
    step: Option<u64>,
    started: Duration,
    completed: Option<Duration>,
}

impl FlightRecorder {
    /// Creates a recorder. Its times count from `began`.
    pub fn new(began: Instant, deadlines: Deadlines) -> Arc<Self> {
        Arc::new(Self {
            began,
            deadlines,
            state: Mutex::default(),
        })
    }

    /// Returns the time since `began`.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Records the start of a step.
    pub fn begin_step(&self, step: u64) {
        let mut state = self.state.lock();
        state.step = Some(step);
        state.steps_begun += 1;
    }

    /// Records the start of a call. Returns the key of the recorded entry.
    pub fn start(&self, sequence: u64, group: &Arc<Group>, signature: &Arc<Signature>) -> u64 {
        let started = self.elapsed();
        let mut state = self.state.lock();
        if state.entries.len() == CALLS_KEPT {
            state.entries.pop_front();
            state.dropped += 1;
        }
        let step = state.step;
        state.entries.push_back(CallEntry {
            sequence,
            group: Arc::clone(group),
            signature: Arc::clone(signature),
            step,
            started,
            completed: None,
        });
        state.dropped + state.entries.len() as u64 - 1
    }

    /// Records that the rank waits in a call.
    pub fn mark_waiting(&self, key: u64) {
        let mut state = self.state.lock();
        let dropped = state.dropped;
        state.waiting.retain(|waiting| *waiting >= dropped);
        state.waiting.push(key);
    }

    /// Records that a call has completed.
    pub fn complete(&self, key: u64) {
        let now = self.elapsed();
        let mut state = self.state.lock();
        state.waiting.retain(|waiting| *waiting != key);
        let index = key.checked_sub(state.dropped);
        if let Some(entry) = index.and_then(|index| state.entries.get_mut(index as usize)) {
            entry.completed.get_or_insert(now);
        }
    }

    /// Returns the recent calls, oldest first.
    pub fn records(&self) -> Vec<CallRecord> {
        let state = self.state.lock();
        state.entries.iter().map(CallEntry::record).collect()
    }

    /// Returns the position of the rank for a failure report.
    pub fn position(&self) -> RankPosition {
        let state = self.state.lock();
        if let Some(entry) = state.waiting_in() {
            return RankPosition::Waiting(entry.describe());
        }
        match state.entries.back() {
            None => RankPosition::NoCalls,
            Some(entry) if entry.completed.is_some() => RankPosition::Completed(entry.describe()),
            Some(entry) => RankPosition::Started(entry.describe()),
        }
    }

    /// Returns the rank's call with sequence number `sequence` on a group, or `None` if it is not among the recent
    /// calls.
    pub fn call_of(&self, group: &Group, sequence: u64) -> Option<String> {
        let same = |entry: &&CallEntry| {
            let of_group =
                entry.group.name() == group.name() && entry.group.ranks() == group.ranks();
            of_group && entry.sequence == sequence && !entry.signature.is_message()
        };
        let state = self.state.lock();
        let entry = state.entries.iter().rev().find(same)?;
        Some(entry.signature.describe(&entry.group))
    }

    /// Returns the timeout of the call with sequence number `sequence` on a group.
    pub fn deadline(&self, sequence: u64) -> Duration {
        if sequence == 0 || self.state.lock().steps_begun == 1 {
            self.deadlines.first
        } else {
            self.deadlines.later
        }
    }
}

impl RecorderState {
    fn waiting_in(&self) -> Option<&CallEntry> {
        let index = self.waiting.last()?.checked_sub(self.dropped)?;
        self.entries.get(index as usize)
    }
}

impl CallEntry {
    fn record(&self) -> CallRecord {
        CallRecord {
            rank: self.group.world_rank(),
            step: self.step,
            sequence: self.sequence,
            group: self.group.name().to_owned(),
            ranks: list_ranks(self.group.ranks()),
            operation: self.signature.name(),
            call: self.signature.describe(&self.group),
            len: self.signature.len,
            dtype: self.signature.dtype,
            started: self.started.as_secs_f64(),
            completed: self.completed.map(|time| time.as_secs_f64()),
        }
    }

    fn describe(&self) -> String {
        let (sequence, call) = (self.sequence, self.signature.describe(&self.group));
        let unit = if self.signature.is_message() {
            "message"
        } else {
            "call"
        };
        let step = match self.step {
            Some(step) => format!(" in step {step}"),
            None => String::new(),
        };
        format!("{unit} {sequence} {call} over {}{step}", self.group)
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
