//! Collectives that are composed of point-to-point messages between processes, over any [`P2pTransport`].
//!
//! The collectives of a message-passing library have weaker guarantees than a [`Communicator`](crate::Communicator).
//! Ranks with different calls hang or get wrong data. The order of a reduction is not defined. The collectives of
//! overlapping groups must be started in one order.
//!
//! Here, a collective consists of one or two rounds of messages ([`rounds`]). Each message begins with a [`control`]
//! message that contains the sender's call. The receiver compares this call with its own call ([`mismatch`]). Control
//! messages that arrive before the local call are kept until the call is made. A payload that does not fit into the
//! control message is sent with a separate tag, so that it blocks no other message. [`reduce`](crate::engines::reduce)
//! reduces in group order.
//!
//! While the rank computes, one thread of the process owns the transport, moves the messages and reduces
//! ([`progress`]).

mod collective;
mod control;
mod memory;
mod messages;
mod mismatch;
mod p2p;
mod progress;
mod rank;
mod requests;
mod rounds;
mod transport;

pub(crate) use control::MAX_CONTROL_BYTES;
#[cfg(all(test, feature = "mpi"))]
pub(crate) use memory::ReceiveBuffer;
pub(crate) use memory::{ReceiveSlice, SendSlice};
pub(crate) use p2p::{P2pEvent, P2pTransport, RequestId, Tag};
pub(crate) use transport::P2pCollectives;

#[cfg(test)]
pub(crate) mod tests;
