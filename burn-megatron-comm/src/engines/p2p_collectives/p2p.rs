//! The interface for point-to-point messages between the processes of a world.

use super::memory::{ReceiveSlice, SendSlice};
use crate::error::CommError;

/// The identifier of a send or receive that was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

/// The tag of a payload, counted from 1.
pub type Tag = u16;

/// The number of tags that can be in use at the same time for messages from one rank to another. The MPI standard (4.1,
/// section 9.1.2) guarantees tags up to 32,767.
pub const MAX_TAGS: Tag = 32_000;

/// An event of a transport.
#[derive(Debug)]
pub enum P2pEvent {
    /// A control message was received.
    Control {
        /// The world rank that sent the message.
        from: usize,
        /// The encoded message.
        bytes: Vec<u8>,
    },
    /// A send or a receive is complete, and its memory has been released.
    Completed(RequestId),
}

/// A transport for short control messages and for payloads. Control messages are received without a request. Payloads
/// are received only on request. Ranks are world ranks.
///
/// No method blocks, except [`finish`](Self::finish). Control messages from the same rank arrive in the order in which
/// they were sent. A transport that is dropped leaks the memory of requests in flight, because this memory may still be
/// written.
///
/// After an error, the transport cannot be used anymore.
pub trait P2pTransport {
    /// Returns this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Sends a control message of at most [`MAX_CONTROL_BYTES`](super::control::MAX_CONTROL_BYTES) bytes.
    fn send_control(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError>;

    /// Sends a payload. The send completes only after the receiver has started to receive the payload, so the tag can
    /// be reused after that.
    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: SendSlice,
        request: RequestId,
    ) -> Result<(), CommError>;

    /// Receives the payload with this tag. The payload must have the same size as the slice.
    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: ReceiveSlice,
        request: RequestId,
    ) -> Result<(), CommError>;

    /// Appends the events that have occurred since the last call to `events`.
    fn poll(&mut self, events: &mut Vec<P2pEvent>) -> Result<(), CommError>;

    /// Returns whether all operations that were started are complete, including control messages.
    fn is_idle(&self) -> bool;

    /// Closes a transport that is idle. Collective: call on all ranks.
    fn finish(self) -> Result<(), CommError>;
}
