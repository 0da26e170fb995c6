//! Collectives between processes that are composed of point-to-point messages. They work with any [`P2pTransport`].
//!
//! The collectives of a message-passing library guarantee less than a [`Communicator`](crate::Communicator). If ranks
//! issue different calls, they hang or get wrong data. The order of the additions in a reduction is not defined. The
//! collectives of groups that share ranks must be started in one order.
//!
//! In this module, a collective consists of one or two rounds of messages ([`rounds`]). Each message begins with a
//! [`control`] message, which contains the sender's call. The receiver compares this call with its own call
//! ([`mismatch`]). A control message that arrives before the rank has issued the call is kept until then. A payload
//! that does not fit into the control message is sent with a separate tag, so that it does not block other messages.
//! [`reduce`](crate::engines::reduce) reduces in group order.
//!
//! One thread of the process owns the transport. It transfers the messages and reduces while the rank computes
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
