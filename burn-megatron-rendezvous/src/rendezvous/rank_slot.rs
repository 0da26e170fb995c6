//! A rank that has joined the rendezvous, and the checks of a rank that requests to join.

use std::collections::BTreeMap;
use std::time::Duration;

use super::message::{CallId, Hello};
use crate::failure_report::RankPosition;

/// A rank that has joined the rendezvous.
#[derive(Debug)]
pub(super) struct RegisteredRank {
    pub hello: Hello,
    /// The time at which the last message arrived from the rank.
    pub last_message: Duration,
    pub position: RankPosition,
    /// The number of collectives per group if the rank has returned, otherwise `None`.
    pub returned: Option<BTreeMap<u64, u64>>,
    pub disconnected: bool,
}

impl RegisteredRank {
    /// Returns whether the rank has returned without joining `call`. Returns `None` if the rank has not returned.
    pub fn returned_before(&self, call: CallId) -> Option<bool> {
        let calls = self.returned.as_ref()?;
        let made = calls.get(&call.group.0);
        Some(made.is_none_or(|made| *made <= call.sequence))
    }
}

/// Returns whether a position is final. After a final position, the rank sends no further position.
pub(super) fn is_final(position: &RankPosition) -> bool {
    matches!(
        position,
        RankPosition::Failed(_)
            | RankPosition::Exited(_)
            | RankPosition::Returned
            | RankPosition::NoHeartbeat(..)
    )
}

/// Returns the reason why a rank cannot join a world with these slots, although it has the token. Returns `None` if the
/// rank can join.
pub(super) fn incompatibility(hello: &Hello, slots: &[Option<RegisteredRank>]) -> Option<String> {
    let Hello { rank, size, .. } = *hello;
    let (version, world) = (env!("CARGO_PKG_VERSION"), slots.len());
    if hello.version != version {
        return Some(format!(
            "rank {rank} runs version {} of burn-megatron, but the rendezvous runs version {version}",
            hello.version
        ));
    }
    if size != world {
        return Some(format!(
            "rank {rank} expects {size} ranks, but the rendezvous expects {world}: set the same WORLD_SIZE on all \
             ranks"
        ));
    }
    if rank >= world {
        let last = world - 1;
        return Some(format!(
            "invalid rank {rank} of {size}: expected 0 to {last}"
        ));
    }
    let other = &slots[rank].as_ref()?.hello;
    Some(format!(
        "two processes are started as rank {rank}: process {} on {} and process {} on {}",
        other.process, other.host, hello.process, hello.host
    ))
}
