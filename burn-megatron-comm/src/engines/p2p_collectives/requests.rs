//! The sends and receives in flight, with the purpose of each.

use std::collections::{HashMap, HashSet};

use super::control::{ControlHeader, ControlMessage, MAX_INLINE_BYTES, PayloadMode};
use super::memory::{ReceiveBuffer, ReceiveSlice, SendSlice};
use super::messages::PendingReceive;
use super::p2p::{MAX_TAGS, P2pTransport, RequestId, Tag};
use crate::buffer::{Buffer, DType};
use crate::error::CommError;
use crate::pool::{BufferPool, PooledBuffer};
use burn_megatron_rendezvous::CallId;

/// The purpose of a payload in flight.
pub enum RequestKind {
    /// A payload that this rank sends. `call` is the collective, or `None` for a point-to-point message.
    Send {
        to: usize,
        tag: Tag,
        call: Option<CallId>,
    },
    /// A payload of a collective that is received from the member with this index.
    CollectiveReceive { call: CallId, index: usize },
    /// The payload of a point-to-point message that is received.
    MessageReceive(PendingReceive),
    /// A payload that is received and then dropped.
    Discarded,
}

/// The content that follows the header of a control message.
pub enum MessageBody {
    Payload(Option<SendSlice>),
    Description(Vec<u8>),
    Rejection(Vec<u8>),
}

/// An allocator of tags for the payloads in flight to one rank.
#[derive(Default)]
struct TagAllocator {
    last: Tag,
    used: HashSet<Tag>,
}

pub struct RequestTable<W> {
    pub transport: W,
    pub engine: &'static str,
    in_flight: HashMap<RequestId, RequestKind>,
    tags: Vec<TagAllocator>,
    last_request: u64,
}

impl TagAllocator {
    /// Returns a tag that is not in use by a payload in flight, or `None` if all tags are in use.
    fn next(&mut self) -> Option<Tag> {
        if self.used.len() == usize::from(MAX_TAGS) {
            return None;
        }
        loop {
            self.last = self.last % MAX_TAGS + 1;
            if self.used.insert(self.last) {
                return Some(self.last);
            }
        }
    }
}

impl<W: P2pTransport> RequestTable<W> {
    pub fn new(transport: W, engine: &'static str) -> Self {
        let tags = (0..transport.size())
            .map(|_| TagAllocator::default())
            .collect();
        Self {
            transport,
            engine,
            in_flight: HashMap::new(),
            tags,
            last_request: 0,
        }
    }

    /// Returns whether any payloads are in flight.
    pub fn has_transfers(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Returns whether all sends and receives that were started are complete.
    pub fn is_idle(&self) -> bool {
        !self.has_transfers() && self.transport.is_idle()
    }

    /// Creates an error of this engine.
    pub fn error(&self, message: String) -> CommError {
        CommError::engine(self.engine, message)
    }

    /// Sends a control message and its payload. Returns whether the payload is sent as a separate message.
    pub fn send(
        &mut self,
        to: usize,
        mut header: ControlHeader,
        body: MessageBody,
        call: Option<CallId>,
    ) -> Result<bool, CommError> {
        let (payload_mode, body, payload) = match body {
            MessageBody::Description(words) => (PayloadMode::None, words, None),
            MessageBody::Rejection(words) => (PayloadMode::Rejected, words, None),
            MessageBody::Payload(None) => (PayloadMode::None, Vec::new(), None),
            MessageBody::Payload(Some(payload)) if payload.bytes().len() <= MAX_INLINE_BYTES => {
                (PayloadMode::Inline, payload.bytes().to_vec(), None)
            }
            MessageBody::Payload(Some(payload)) => {
                let tag = self.tags[to].next().ok_or_else(|| {
                    self.error(format!(
                        "rank {to} has {MAX_TAGS} messages in flight, which is the maximum, and receives none of them"
                    ))
                })?;
                let bytes = payload.bytes().len() as u64;
                (
                    PayloadMode::Tagged { tag, bytes },
                    Vec::new(),
                    Some((tag, payload)),
                )
            }
        };
        header.payload_mode = payload_mode;
        self.transport
            .send_control(to, ControlMessage { header, body }.encode())?;
        match payload {
            None => Ok(false),
            Some((tag, payload)) => {
                let request = self.new_request(RequestKind::Send { to, tag, call });
                self.transport
                    .send(to, tag, payload, request)
                    .map(|()| true)
            }
        }
    }

    /// Starts to receive a payload.
    pub fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        slice: ReceiveSlice,
        kind: RequestKind,
    ) -> Result<(), CommError> {
        let request = self.new_request(kind);
        self.transport.receive(from, tag, slice, request)
    }

    /// Receives the payload of a control message and drops it, so that the sender is not blocked.
    pub fn discard(&mut self, from: usize, payload_mode: PayloadMode) -> Result<(), CommError> {
        let PayloadMode::Tagged { tag, bytes } = payload_mode else {
            return Ok(());
        };
        let len = bytes as usize;
        let nowhere = PooledBuffer::new(Buffer::zeros(DType::U8, len), &BufferPool::new().into());
        match ReceiveBuffer::single(nowhere, 0..len) {
            (_, None) => Ok(()),
            (_, Some(slice)) => self.receive(from, tag, slice, RequestKind::Discarded),
        }
    }

    /// Removes a completed request and returns its purpose.
    pub fn complete(&mut self, request: RequestId) -> Option<RequestKind> {
        let kind = self.in_flight.remove(&request);
        if let Some(RequestKind::Send { to, tag, .. }) = &kind {
            self.tags[*to].used.remove(tag);
        }
        kind
    }

    /// Fails the receives whose payloads are in flight.
    pub fn fail_receives(&self, error: &CommError) {
        for kind in self.in_flight.values() {
            if let RequestKind::MessageReceive(pending) = kind {
                pending.fail(error);
            }
        }
    }

    fn new_request(&mut self, kind: RequestKind) -> RequestId {
        self.last_request += 1;
        self.in_flight.insert(RequestId(self.last_request), kind);
        RequestId(self.last_request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_used_again_when_its_payload_is_gone() {
        let mut tags = TagAllocator::default();
        assert_eq!((tags.next(), tags.next()), (Some(1), Some(2)));
        tags.used.remove(&1);
        // The first tag stays in use while all other requests complete.
        for wanted in 3..=MAX_TAGS {
            assert_eq!(tags.next(), Some(wanted));
            tags.used.remove(&wanted);
        }
        assert_eq!((tags.next(), tags.next()), (Some(1), Some(3)));
    }

    #[test]
    fn tags_run_out() {
        let mut tags = TagAllocator::default();
        let taken = (0..MAX_TAGS).filter_map(|_| tags.next()).count();
        assert_eq!((taken, tags.next()), (usize::from(MAX_TAGS), None));
        tags.used.remove(&77);
        assert_eq!(tags.next(), Some(77));
    }
}
