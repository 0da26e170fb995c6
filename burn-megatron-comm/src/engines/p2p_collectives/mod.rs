//! Collectives composed of point-to-point messages between processes, over any [`P2pTransport`].
//!
//! The collectives of a message-passing library promise less than a [`Communicator`](crate::Communicator)
//! does: ranks that make different calls hang or get garbage, the order of a reduction is free, and the
//! collectives of overlapping groups must be started in one order. Here a collective is one or two rounds of
//! messages ([`rounds`]). Each message begins with a [`control`] message that carries the sender's call, which
//! the receiver compares with its own ([`mismatch`]). Control messages that arrive before the local call are
//! kept until it is made. A payload that does not fit inside the control message is sent under a tag of its own,
//! so that it blocks nothing else. [`reduce`](crate::engines::reduce) reduces in group order.
//!
//! One thread of the process owns the transport, moves the messages and reduces ([`progress`]), while the rank
//! computes.

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
