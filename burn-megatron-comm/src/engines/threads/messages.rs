//! Point-to-point messages, which are received in the order in which they were sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::group_state::GroupState;
use crate::buffer::Buffer;
use crate::error::CommError;
use crate::report::recorded_call::RecordedCall;

/// The messages from one rank to another rank.
#[derive(Debug, Default)]
pub(super) struct MessageQueue {
    sent: u64,
    received: u64,
    /// The messages that were sent but not received yet, keyed by number.
    arrived: BTreeMap<u64, Buffer>,
    /// The numbers of the messages whose receive was dropped before the message was sent.
    discarded: BTreeSet<u64>,
}

#[cfg(test)]
impl MessageQueue {
    pub fn is_empty(&self) -> bool {
        self.arrived.is_empty() && self.discarded.is_empty()
    }
}

impl GroupState {
    /// Returns the number of the next message from one rank to another rank.
    pub fn next_sent(&self, from: usize, to: usize) -> u64 {
        self.change(to, |calls| {
            let queue = calls.messages.entry((from, to)).or_default();
            queue.sent += 1;
            queue.sent - 1
        })
    }

    /// Delivers a message.
    pub fn deliver(&self, from: usize, to: usize, number: u64, message: Buffer) {
        self.change(to, |calls| {
            let queue = calls.messages.entry((from, to)).or_default();
            if !queue.discarded.remove(&number) {
                queue.arrived.insert(number, message);
            }
        });
    }
}

/// A receive that was started. If it is dropped, its message is discarded.
pub(super) struct PendingReceive {
    group: Arc<GroupState>,
    pair: (usize, usize),
    number: u64,
    done: bool,
}

impl PendingReceive {
    pub fn new(group: &Arc<GroupState>, from: usize, to: usize) -> Self {
        let number = group.change(to, |calls| {
            let queue = calls.messages.entry((from, to)).or_default();
            queue.received += 1;
            queue.received - 1
        });
        Self {
            group: Arc::clone(group),
            pair: (from, to),
            number,
            done: false,
        }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    /// Blocks until the message arrives. Checks that the message has the type and the length that the receive expects.
    pub fn wait(mut self, call: &RecordedCall) -> Result<Buffer, CommError> {
        let group = Arc::clone(&self.group);
        let message = group.block_until(call, |calls| {
            let queue = calls.messages.entry(self.pair).or_default();
            queue
                .arrived
                .remove(&self.number)
                .map(Ok)
                .ok_or_else(|| vec![self.pair.0])
        })?;
        self.done = true;
        call.check_message(message)
    }
}

impl Drop for PendingReceive {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        self.group.change(self.pair.1, |calls| {
            let queue = calls.messages.entry(self.pair).or_default();
            if queue.arrived.remove(&self.number).is_none() {
                queue.discarded.insert(self.number);
            }
        });
    }
}
