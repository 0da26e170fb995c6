//! The interface of one process to point-to-point messages between the processes of a world.

use super::memory::{ReceiveSlice, SendSlice};
use crate::error::CommError;

/// The identifier of a started send or receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub u64);

/// The tag of a payload, starting at 1.
pub type Tag = u16;

/// The number of tags that an ordered pair of ranks can use at the same time. The MPI standard (4.1, section 9.1.2)
/// guarantees tags up to 32,767.
pub const MAX_TAGS: Tag = 32_000;

/// An event of a transport.
#[derive(Debug)]
pub enum P2pEvent {
    /// A control message was received.
    Control {
        /// The world rank that sent it.
        from: usize,
        /// The encoded message.
        bytes: Vec<u8>,
    },
    /// A send or receive is complete, and its memory has been released.
    Completed(RequestId),
}

/// A transport for short control messages and for payloads. Control messages are received without a request. Payloads
/// are received on request. Ranks are world ranks.
///
/// No method waits, except [`finish`](Self::finish). The control messages of one rank arrive in order. A dropped
/// transport leaks the memory of requests in flight, because this memory may still be written.
///
/// After an error, the transport cannot be used anymore.
pub trait P2pTransport {
    /// Returns this rank.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Sends a control message of at most [`MAX_CONTROL_BYTES`](super::control::MAX_CONTROL_BYTES) bytes.
    fn send_control(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError>;

    /// Sends a payload. The send completes only after the receiver has started to receive it, so the tag can be reused
    /// afterwards.
    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: SendSlice,
        request: RequestId,
    ) -> Result<(), CommError>;

    /// Receives the payload with this tag. Its size must be the size of the slice.
    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: ReceiveSlice,
        request: RequestId,
    ) -> Result<(), CommError>;

    /// Appends the events since the last call.
    fn poll(&mut self, events: &mut Vec<P2pEvent>) -> Result<(), CommError>;

    /// Returns whether everything that was started is complete, including control messages.
    fn is_idle(&self) -> bool;

    /// Closes the transport of an idle rank. Collective: call on all ranks.
    fn finish(self) -> Result<(), CommError>;
}
