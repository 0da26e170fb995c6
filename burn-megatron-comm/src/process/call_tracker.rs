//! The calls that a rank has started, for status queries from other threads.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::communicator::Group;
use crate::report::flight_recorder::FlightRecorder;
use burn_megatron_rendezvous::{CallId, GroupId, RankPosition, RankStatus, StatusProvider};

/// The flight recorder of a rank, and the number of calls that the rank has started on each of its groups.
#[derive(Debug)]
pub(crate) struct CallTracker {
    recorder: Arc<FlightRecorder>,
    groups: Mutex<HashMap<GroupId, StartedCalls>>,
}

/// A counter of the collectives that a rank has started on one group, or of the messages that it has sent to one rank.
#[derive(Debug)]
struct StartedCalls {
    group: Arc<Group>,
    count: Arc<AtomicU64>,
}

impl CallTracker {
    /// Creates the tracker of a rank without groups.
    pub fn new(recorder: Arc<FlightRecorder>) -> Arc<Self> {
        Arc::new(Self {
            recorder,
            groups: Mutex::default(),
        })
    }

    /// Returns the flight recorder.
    pub fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.recorder
    }

    /// Returns the counter of a group. If the group has no counter, creates a counter with the value 0.
    pub fn counter(&self, id: GroupId, group: &Arc<Group>) -> Arc<AtomicU64> {
        let mut groups = self.groups.lock();
        let started = groups.entry(id).or_insert_with(|| StartedCalls {
            group: Arc::clone(group),
            count: Arc::default(),
        });
        Arc::clone(&started.count)
    }

    /// Returns the number of started calls per group.
    pub fn calls(&self) -> Vec<(u64, u64)> {
        let groups = self.groups.lock();
        let count = |(id, started): (&GroupId, &StartedCalls)| {
            (id.0, started.count.load(Ordering::Acquire))
        };
        groups.iter().map(count).collect()
    }
}

impl StatusProvider for CallTracker {
    fn position(&self) -> RankPosition {
        self.recorder.position()
    }

    fn status(&self, call: Option<CallId>) -> RankStatus {
        let position = self.position();
        let groups = self.groups.lock();
        let group = call.and_then(|call| Some((call, groups.get(&call.group)?)));
        // An unknown group may be about to be created by a split.
        let (joined, call) = match group {
            None => (false, None),
            Some((call, started)) => (
                started.count.load(Ordering::Acquire) > call.sequence,
                self.recorder.call_of(&started.group, call.sequence),
            ),
        };
        RankStatus {
            position,
            joined,
            call,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::call::{Call, Signature};
    use crate::process::part_id;
    use crate::report::flight_recorder::Deadlines;

    #[test]
    fn it_reports_whether_the_rank_has_joined_a_call() {
        let second = Duration::from_secs(1);
        let deadlines = Deadlines {
            first: second,
            later: second,
        };
        let tracker = CallTracker::new(FlightRecorder::new(Instant::now(), deadlines));
        let group = Arc::new(Group::new("data", vec![1, 3], 0));
        let id = part_id(GroupId::WORLD, 2, 1);
        let counter = tracker.counter(id, &group);
        let call = |sequence| {
            Some(CallId {
                group: id,
                sequence,
            })
        };
        assert!(!tracker.status(call(0)).joined);
        let signature = Arc::new(Signature::new(Call::Barrier, &Vec::<u8>::new().into()));
        tracker.recorder().start(0, &group, &signature);
        counter.fetch_add(1, Ordering::AcqRel);
        let status = tracker.status(call(0));
        assert!(status.joined);
        assert_eq!(status.call.as_deref(), Some("barrier"));
        assert!(!tracker.status(call(1)).joined);
        assert_eq!(tracker.calls(), [(id.0, 1)]);
        let unknown = tracker.status(Some(CallId {
            group: GroupId(77),
            sequence: 0,
        }));
        assert!(!unknown.joined);
    }
}
