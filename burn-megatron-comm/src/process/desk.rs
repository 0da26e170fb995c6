//! What one rank knows of its own calls, so that it can be asked at any time.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::transport::GroupId;
use crate::communicator::Group;
use crate::journal::Journal;
use crate::log::Position;
use crate::rendezvous::{CallOf, Stand, Witness};

/// The journal of a rank, and how many calls it has started on each of its groups.
#[derive(Debug)]
pub(crate) struct Desk {
    journal: Arc<Journal>,
    groups: Mutex<HashMap<GroupId, Started>>,
}

/// The collectives that a rank has started on one group, or the messages it has sent to one peer.
#[derive(Debug)]
struct Started {
    group: Arc<Group>,
    count: Arc<AtomicU64>,
}

impl Desk {
    /// The desk of a rank that has no group yet.
    pub fn new(journal: Arc<Journal>) -> Arc<Self> {
        Arc::new(Self {
            journal,
            groups: Mutex::default(),
        })
    }

    /// The journal.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// The counter of a group, from 0 when it is asked for first.
    pub fn counter(&self, id: GroupId, group: &Arc<Group>) -> Arc<AtomicU64> {
        let mut groups = self.groups();
        let started = groups.entry(id).or_insert_with(|| Started {
            group: Arc::clone(group),
            count: Arc::default(),
        });
        Arc::clone(&started.count)
    }

    /// The number of calls started on each group.
    pub fn calls(&self) -> Vec<(u64, u64)> {
        let groups = self.groups();
        let count =
            |(id, started): (&GroupId, &Started)| (id.0, started.count.load(Ordering::Acquire));
        groups.iter().map(count).collect()
    }

    /// No code that can panic leaves the groups half written.
    fn groups(&self) -> MutexGuard<'_, HashMap<GroupId, Started>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Witness for Desk {
    fn position(&self) -> Position {
        self.journal.position()
    }

    fn stand(&self, call: Option<CallOf>) -> Stand {
        let position = self.position();
        let groups = self.groups();
        let asked = call.and_then(|call| Some((call, groups.get(&GroupId(call.group))?)));
        // Who does not know the group has nothing to come to, unless it is about to join it.
        let (came, call) = match asked {
            None => (false, None),
            Some((call, started)) => (
                started.count.load(Ordering::Acquire) > call.sequence,
                self.journal.call_of(&started.group, call.sequence),
            ),
        };
        Stand {
            position,
            came,
            call,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::call::{Call, Signature};
    use crate::journal::Deadlines;

    #[test]
    fn it_says_whether_the_rank_has_come_to_a_call() {
        let second = Duration::from_secs(1);
        let deadlines = Deadlines {
            first: second,
            then: second,
        };
        let desk = Desk::new(Journal::new(Instant::now(), deadlines));
        let group = Arc::new(Group::new("data", vec![1, 3], 0));
        let id = GroupId::WORLD.part(2, 1);
        let counter = desk.counter(id, &group);
        let call = |sequence| {
            Some(CallOf {
                group: id.0,
                sequence,
            })
        };
        assert!(!desk.stand(call(0)).came);
        let signature = Arc::new(Signature::new(Call::Barrier, &Vec::<u8>::new().into()));
        desk.journal().start(0, &group, &signature);
        counter.fetch_add(1, Ordering::AcqRel);
        let stand = desk.stand(call(0));
        assert!(stand.came);
        assert_eq!(stand.call.as_deref(), Some("barrier"));
        assert!(!desk.stand(call(1)).came);
        assert_eq!(desk.calls(), [(id.0, 1)]);
        let stranger = desk.stand(Some(CallOf {
            group: 77,
            sequence: 0,
        }));
        assert!(!stranger.came);
    }
}
