//! Collectives made of messages between processes, over any [`Wire`].
//!
//! The collectives of a message-passing library would be shorter to call, but they promise less than a
//! [`Communicator`](super::Communicator) does: ranks that make different calls hang or get garbage, the
//! order of a sum is free, and ranks must start the collectives of overlapping groups in one order. Here a
//! collective is a few rounds of messages ([`plan`]). Each begins with a note that carries the sender's
//! fingerprint of the call ([`header`]), which is compared with the reader's own ([`agreement`]). Notes
//! that come before this rank makes the call wait for it; a payload that does not fit in its note travels
//! under a number of its own, so that it blocks nothing else. Sums are made by
//! [`reduce`](super::reduce), in the order of the group.
//!
//! One thread of the process owns the wire and does all of this, sums included ([`progress`]), while the
//! rank computes.

mod agreement;
mod collective;
mod header;
mod memory;
mod messages;
mod plan;
mod post;
mod progress;
mod rank;
mod transport;
mod wire;

pub(super) use header::NOTE;
#[cfg(all(test, feature = "mpi"))]
pub(super) use memory::Landing;
pub(super) use memory::{Incoming, Outgoing};
pub(super) use transport::Exchange;
pub(super) use wire::{Event, Tag, Ticket, Wire};

#[cfg(test)]
pub(super) mod tests;
