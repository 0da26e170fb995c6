//! Messages of a rank to itself, which never leave the host.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::call::Signature;
use crate::process::{GroupId, Slot};

/// What was sent and not yet asked for, or asked for and not yet sent, by group.
#[derive(Debug, Default)]
pub(super) struct OwnMail(HashMap<GroupId, Mailbox>);

#[derive(Debug, Default)]
struct Mailbox {
    sent: VecDeque<Buffer>,
    wanted: VecDeque<(Arc<Signature>, Arc<Slot>)>,
}

impl OwnMail {
    pub fn send(&mut self, group: GroupId, message: Buffer) {
        let mail = self.0.entry(group).or_default();
        mail.sent.push_back(message);
        mail.deliver();
    }

    /// `signature` is that of the receive.
    pub fn receive(&mut self, group: GroupId, signature: Arc<Signature>, slot: Arc<Slot>) {
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
            slot.fulfil(match fits {
                true => Ok(message),
                false => Err(super::error(format!(
                    "this rank sent itself {} {}, but expects {} {}",
                    message.len(),
                    message.dtype(),
                    wanted.len,
                    wanted.dtype
                ))),
            });
        }
    }
}
