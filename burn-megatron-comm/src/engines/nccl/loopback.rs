//! Messages of a rank to itself, which never leave the host.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::Signature;
use crate::process::{GroupId, ResultSlot};

/// Messages that were sent and not received, or receives without a message, by group.
#[derive(Debug, Default)]
pub(super) struct NcclLoopback(HashMap<GroupId, Mailbox>);

#[derive(Debug, Default)]
struct Mailbox {
    sent: VecDeque<Buffer>,
    wanted: VecDeque<(Arc<Signature>, Arc<ResultSlot>)>,
}

impl NcclLoopback {
    pub fn send(&mut self, group: GroupId, message: Buffer) {
        let mail = self.0.entry(group).or_default();
        mail.sent.push_back(message);
        mail.deliver();
    }

    /// `signature` is that of the receive.
    pub fn receive(&mut self, group: GroupId, signature: Arc<Signature>, slot: Arc<ResultSlot>) {
        let mail = self.0.entry(group).or_default();
        mail.wanted.push_back((signature, slot));
        mail.deliver();
    }
}

impl Mailbox {
    fn deliver(&mut self) {
        while !self.sent.is_empty() && !self.wanted.is_empty() {
            let (Some(message), Some((wanted, slot))) =
                (self.sent.pop_front(), self.wanted.pop_front())
            else {
                return;
            };
            let fits = (message.dtype(), message.len()) == (wanted.dtype, wanted.len);
            slot.fulfil(if fits {
                Ok(message)
            } else {
                Err(super::error(format!(
                    "this rank sent itself {} {}, but receives {} {}",
                    message.len(),
                    message.dtype(),
                    wanted.len,
                    wanted.dtype
                )))
            });
        }
    }
}
