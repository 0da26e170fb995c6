//! Messages from one rank to another, matched in order.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Visit;
use super::meeting::Meeting;
use crate::buffer::Buffer;
use crate::call::{Call, Signature};
use crate::error::CommError;

/// The messages of one ordered pair of ranks.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    sent: u64,
    claimed: u64,
    /// Sent and not yet collected, by number.
    letters: BTreeMap<u64, Buffer>,
    /// Claimed by a handle that was dropped, and not yet sent.
    unwanted: BTreeSet<u64>,
}

#[cfg(test)]
impl Mailbox {
    pub fn is_empty(&self) -> bool {
        self.letters.is_empty() && self.unwanted.is_empty()
    }
}

impl Meeting {
    /// Takes the number of the next message of a pair.
    pub fn next_sent(&self, from: usize, to: usize) -> u64 {
        self.change(to, |table| {
            let mailbox = table.mail.entry((from, to)).or_default();
            mailbox.sent += 1;
            mailbox.sent - 1
        })
    }

    /// Delivers a message.
    pub fn post(&self, from: usize, to: usize, number: u64, letter: Buffer) {
        self.change(to, |table| {
            let mailbox = table.mail.entry((from, to)).or_default();
            if !mailbox.unwanted.remove(&number) {
                mailbox.letters.insert(number, letter);
            }
        });
    }
}

/// The right to one message of a pair. Dropping it uncollected discards the message.
pub(super) struct Claim {
    meeting: Arc<Meeting>,
    pair: (usize, usize),
    number: u64,
    collected: bool,
}

impl Claim {
    pub fn new(meeting: &Arc<Meeting>, from: usize, to: usize) -> Self {
        let number = meeting.change(to, |table| {
            let mailbox = table.mail.entry((from, to)).or_default();
            mailbox.claimed += 1;
            mailbox.claimed - 1
        });
        Self {
            meeting: Arc::clone(meeting),
            pair: (from, to),
            number,
            collected: false,
        }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    /// Blocks until the message is there and compares it with what the receiver expects.
    pub fn collect(mut self, visit: &Visit) -> Result<Buffer, CommError> {
        let letter = visit.meeting.block_until(visit, |table| {
            let mailbox = table.mail.entry(self.pair).or_default();
            mailbox
                .letters
                .remove(&self.number)
                .map(Ok)
                .ok_or_else(|| vec![self.pair.0])
        })?;
        self.collected = true;
        let expected = &visit.signature;
        let reason = if letter.dtype() != expected.dtype {
            "the types differ"
        } else if letter.len() != expected.len {
            "the lengths differ"
        } else {
            return Ok(letter);
        };
        let (from, to) = self.pair;
        Err(CommError::Mismatch {
            group: visit.group.to_string(),
            sequence: self.number,
            first_rank: visit.group.ranks()[from],
            first_call: Signature::new(Call::Send { to }, &letter).describe(&visit.group),
            second_rank: visit.group.world_rank(),
            second_call: visit.describe(),
            reason: reason.to_owned(),
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.collected {
            return;
        }
        self.meeting.change(self.pair.1, |table| {
            let mailbox = table.mail.entry(self.pair).or_default();
            if mailbox.letters.remove(&self.number).is_none() {
                mailbox.unwanted.insert(self.number);
            }
        });
    }
}
