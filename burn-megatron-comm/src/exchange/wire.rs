//! What moves bytes between the processes of a world, seen from one of them.

use super::memory::{Incoming, Outgoing};
use crate::error::CommError;

/// The name of a message that was given to a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub u64);

/// The number under which a payload travels, from 1.
pub type Tag = u16;

/// The numbers that payloads of one ordered pair of ranks may have at a time. The MPI standard (4.1,
/// section 9.1.2) promises tags up to 32,767.
pub const TAGS: Tag = 32_000;

/// What happened on a wire.
#[derive(Debug)]
pub enum Event {
    /// A note has come.
    Note {
        /// The world rank that sent it.
        from: usize,
        /// What it says.
        bytes: Vec<u8>,
    },
    /// A message is complete, and its memory is no longer held.
    Done(Ticket),
}

/// Moves short notes, which come unasked, and payloads, which are fetched. Ranks are world ranks.
///
/// Nothing here waits, except [`finish`](Self::finish). Notes of one rank arrive in order. A wire that is
/// dropped keeps the memory of what is under way for ever: something may still write there.
///
/// After an error the wire is of no further use.
pub trait Wire {
    /// The number of this rank.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Sends a note of at most [`NOTE`](super::header::NOTE) bytes.
    fn note(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError>;

    /// Sends a payload. It is done only after the receiver has begun to take it, so that its tag may be
    /// used again.
    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: Outgoing,
        ticket: Ticket,
    ) -> Result<(), CommError>;

    /// Takes the payload of that tag, which has the size of the place.
    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: Incoming,
        ticket: Ticket,
    ) -> Result<(), CommError>;

    /// Appends what has happened since the last time.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), CommError>;

    /// Whether everything that was given to the wire is done, notes included.
    fn is_idle(&self) -> bool;

    /// Ends the wire of an idle rank; all ranks come here.
    fn finish(self) -> Result<(), CommError>;
}
