//! Messages from one rank to another, matched by their number.

use std::rc::Rc;
use std::sync::Arc;

use super::header::{Carriage, Header, Note};
use super::memory::{Landing, Outgoing, keep};
use super::post::{Body, Post, Purpose};
use super::wire::Wire;
use crate::buffer::Buffer;
use crate::call::{Call, Operation};
use crate::error::CommError;
use crate::pool::{BufferPool, Lent};
use crate::process::{Job, Slot};

/// A message on its way to this rank.
pub struct Letter {
    slot: Arc<Slot>,
    landing: Landing,
}

impl Letter {
    /// Gives the message, which is complete, to the rank that waits for it.
    pub fn deliver(self, pool: &BufferPool) {
        deliver(self.slot, keep(self.landing.close()), pool);
    }

    pub fn fail(&self, error: &CommError) {
        self.slot.fulfil(Err(error.clone()));
    }
}

/// Puts a result into its slot, or takes it home if nobody wants it.
pub fn deliver(slot: Arc<Slot>, result: Buffer, pool: &BufferPool) {
    match Arc::try_unwrap(slot) {
        Ok(_unwanted) => pool.give(result),
        Err(slot) => slot.fulfil(Ok(result)),
    }
}

/// Sends a message. It is buffered: for the sender, the call is over.
pub fn send<W: Wire>(
    post: &mut Post<W>,
    job: Job,
    pool: &Arc<BufferPool>,
) -> Result<(), CommError> {
    let Operation::Call(Call::Send { to }) = job.signature.operation else {
        unreachable!("only sends come here")
    };
    let empty = Buffer::empty(job.input.dtype());
    let header = Header::of(&job.signature, job.group_id, job.sequence, 0, to);
    let input = Rc::new(Lent::new(job.input, pool));
    let payload = Outgoing::new(&input, 0..input.len());
    post.give(job.group.ranks()[to], header, Body::Payload(payload), None)?;
    job.slot.fulfil(Ok(empty));
    Ok(())
}

/// Takes the message that a receive is for.
pub fn receive<W: Wire>(
    post: &mut Post<W>,
    job: Job,
    note: Note,
    pool: &Arc<BufferPool>,
) -> Result<(), CommError> {
    let Operation::Call(Call::Receive { from, dtype, len }) = job.signature.operation else {
        unreachable!("only receives come here")
    };
    let sender = job.group.ranks()[from];
    // The sender counts as the first: its call was over when the message was sent.
    if let Some(error) = note.mismatch(from, &job.signature, &job.group, true) {
        job.slot.fulfil(Err(error));
        return post.discard(sender, note.header.carriage);
    }
    let result = Lent::new(pool.take(dtype, len), pool);
    let (landing, place) = Landing::at(result, 0..len);
    let letter = Letter {
        slot: job.slot,
        landing,
    };
    match (note.header.carriage, place) {
        (Carriage::Nothing, None) => letter.deliver(pool),
        (Carriage::Inline, Some(place)) if place.len() == note.body.len() => {
            place.fill(&note.body);
            letter.deliver(pool);
        }
        (Carriage::Tagged { tag, bytes }, Some(place)) if place.len() as u64 == bytes => {
            post.take(sender, tag, place, Purpose::Letter(letter))?;
        }
        (carriage, _) => {
            return Err(post.error(format!(
                "rank {sender} sends {carriage:?} with {} bytes as message {} over {}, where {len} {dtype} \
                 are expected; do all ranks run the same build of this program?",
                note.body.len(),
                job.sequence,
                job.group
            )));
        }
    }
    Ok(())
}
