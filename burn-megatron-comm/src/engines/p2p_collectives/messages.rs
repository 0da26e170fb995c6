//! Point-to-point sends and receives, which are matched by sequence number.

use std::rc::Rc;
use std::sync::Arc;

use super::control::{ControlHeader, ControlMessage, PayloadMode};
use super::memory::{ReceiveBuffer, SendSlice, detach};
use super::p2p::P2pTransport;
use super::requests::{MessageBody, RequestKind, RequestTable};
use crate::buffer::Buffer;
use crate::call::{Call, Operation};
use crate::error::CommError;
use crate::pool::{BufferPool, PooledBuffer};
use crate::process::{Job, ResultSlot};

/// A receive whose payload is being received.
pub struct PendingReceive {
    slot: Arc<ResultSlot>,
    landing: ReceiveBuffer,
}

impl PendingReceive {
    /// Passes the complete message to the rank that waits for it.
    pub fn complete(self, pool: &BufferPool) {
        complete(self.slot, detach(self.landing.into_inner()), pool);
    }

    pub fn fail(&self, error: &CommError) {
        self.slot.fulfil(Err(error.clone()));
    }
}

/// Puts a result into its slot. If no handle uses the slot, the memory of the result returns to the pool.
pub fn complete(slot: Arc<ResultSlot>, result: Buffer, pool: &BufferPool) {
    match Arc::try_unwrap(slot) {
        Ok(_unwanted) => pool.give(result),
        Err(slot) => slot.fulfil(Ok(result)),
    }
}

/// Starts a send. The message is buffered, so the send is complete for the sender.
pub fn send<W: P2pTransport>(
    requests: &mut RequestTable<W>,
    job: Job,
    pool: &Arc<BufferPool>,
) -> Result<(), CommError> {
    let Operation::Call(Call::Send { to }) = job.signature.operation else {
        unreachable!("only sends are passed here")
    };
    let empty = Buffer::empty(job.input.dtype());
    let header = ControlHeader::new(&job.signature, job.group_id, job.sequence, 0, to);
    let input = Rc::new(PooledBuffer::new(job.input, pool));
    let payload = SendSlice::new(&input, 0..input.len());
    requests.send(
        job.group.ranks()[to],
        header,
        MessageBody::Payload(payload),
        None,
    )?;
    job.slot.fulfil(Ok(empty));
    Ok(())
}

/// Receives the message that matches a receive call.
pub fn receive<W: P2pTransport>(
    requests: &mut RequestTable<W>,
    job: Job,
    message: ControlMessage,
    pool: &Arc<BufferPool>,
) -> Result<(), CommError> {
    let Operation::Call(Call::Receive { from, dtype, len }) = job.signature.operation else {
        unreachable!("only receives are passed here")
    };
    let sender = job.group.ranks()[from];
    // The sender is named as the first rank, because its call was complete when the message was sent.
    if let Some(error) = message.mismatch(from, &job.signature, &job.group, true) {
        job.slot.fulfil(Err(error));
        return requests.discard(sender, message.header.payload_mode);
    }
    let result = PooledBuffer::new(pool.take(dtype, len), pool);
    let (landing, slice) = ReceiveBuffer::single(result, 0..len);
    let pending = PendingReceive {
        slot: job.slot,
        landing,
    };
    match (message.header.payload_mode, slice) {
        (PayloadMode::None, None) => pending.complete(pool),
        (PayloadMode::Inline, Some(slice)) if slice.len() == message.body.len() => {
            slice.fill(&message.body);
            pending.complete(pool);
        }
        (PayloadMode::Tagged { tag, bytes }, Some(slice)) if slice.len() as u64 == bytes => {
            requests.receive(sender, tag, slice, RequestKind::MessageReceive(pending))?;
        }
        (payload_mode, _) => {
            return Err(requests.error(format!(
                "rank {sender} sends {payload_mode:?} with {} bytes as message {} over {}, where {len} {dtype} \
                 are expected; do all ranks run the same build of this program?",
                message.body.len(),
                job.sequence,
                job.group
            )));
        }
    }
    Ok(())
}
