//! The receives of a rank that are posted ahead of time.

use std::collections::BTreeMap;

use crate::profile::StageProfile;
use burn_megatron::pipeline::schedule::{Action, ActionKind, Schedule};

/// The memory of posted receives. Like the [pipeline engine](burn_megatron::pipeline::engine), it posts `ahead`
/// receives from each neighbor before the schedule reaches them.
pub(super) struct PostedReceives {
    ahead: usize,
    /// The sizes in bytes of the tensors that are received from each peer, in order.
    bytes: BTreeMap<usize, Vec<u64>>,
    /// The number of receives from each peer that the schedule has reached.
    reached: BTreeMap<usize, usize>,
}

impl PostedReceives {
    pub fn new(schedule: &Schedule, rank: usize, stages: &[StageProfile], ahead: usize) -> Self {
        let mut bytes: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        let receives = schedule.actions(rank).iter();
        for receive in receives.filter(|action| action.kind.is_receive()) {
            if let Some(peer) = schedule.peer(receive) {
                let stage = &stages[receive.stage];
                bytes.entry(peer).or_default().push(match receive.kind {
                    ActionKind::ReceiveActivation => stage.input_bytes,
                    _ => stage.output_bytes(),
                });
            }
        }
        Self {
            ahead,
            bytes,
            reached: BTreeMap::new(),
        }
    }

    /// Returns the size of the receives that are posted before the first action, in bytes.
    pub fn at_start(&self) -> u64 {
        let of_peer = |bytes: &Vec<u64>| bytes.iter().take(self.ahead).sum::<u64>();
        self.bytes.values().map(of_peer).sum()
    }

    /// Returns the size in bytes of the receive that is posted when the schedule reaches `receive`.
    pub fn posted_in(&mut self, receive: &Action, schedule: &Schedule) -> u64 {
        let Some(peer) = schedule.peer(receive) else {
            return 0;
        };
        let reached = self.reached.entry(peer).or_default();
        let posted = reached.checked_add(self.ahead);
        *reached += 1;
        let bytes = posted.and_then(|posted| self.bytes.get(&peer)?.get(posted));
        bytes.copied().unwrap_or(0)
    }
}
