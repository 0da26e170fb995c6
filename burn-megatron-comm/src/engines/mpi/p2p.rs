//! The implementation of [`P2pTransport`] over MPI.

use ::mpi::environment::Threading;

use super::raw::{ControlReceives, MessageMemory, MessageSet, MpiMessage, MpiWorld};
use crate::engines::p2p_collectives::{
    MAX_CONTROL_BYTES, P2pEvent, P2pTransport, ReceiveSlice, RequestId, SendSlice, Tag,
};
use crate::error::CommError;

/// The number of receives that are posted for control messages. If more messages arrive between two polls, MPI buffers
/// them.
const POSTED_CONTROL_RECEIVES: usize = 32;

pub(super) struct MpiP2p {
    /// This field is declared first, so that after a panic it is dropped before the memory of the other fields.
    messages: MessageSet,
    control: ControlReceives,
    world: MpiWorld,
    largest: usize,
}

impl MpiP2p {
    /// Starts MPI. Payloads of more than `largest` bytes are sent in several pieces.
    pub fn open(largest: usize) -> Result<Self, CommError> {
        let world = MpiWorld::open()?;
        Ok(Self {
            messages: MessageSet::new(),
            control: ControlReceives::open(&world, POSTED_CONTROL_RECEIVES)?,
            world,
            largest,
        })
    }

    /// Returns the level of thread support that MPI provides.
    pub fn thread_level(&self) -> &'static str {
        match self.world.threading {
            Threading::Single => "thread level single",
            Threading::Funneled => "thread level funneled",
            Threading::Serialized => "thread level serialized",
            Threading::Multiple => "thread level multiple",
        }
    }

    fn start(
        &mut self,
        peer: usize,
        tag: Tag,
        memory: MessageMemory,
        request: Option<RequestId>,
    ) -> Result<(), CommError> {
        let message = MpiMessage {
            memory,
            peer,
            request,
        };
        // A control message is short, so it is received in one piece.
        let largest = match message.memory {
            MessageMemory::Control(_) => MAX_CONTROL_BYTES,
            MessageMemory::Send(_) | MessageMemory::Receive(_) => self.largest,
        };
        self.messages.start(&self.world, message, tag, largest)
    }
}

impl P2pTransport for MpiP2p {
    fn rank(&self) -> usize {
        self.world.rank
    }

    fn size(&self) -> usize {
        self.world.size
    }

    fn send_control(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError> {
        self.start(to, 0, MessageMemory::Control(bytes), None)
    }

    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: SendSlice,
        request: RequestId,
    ) -> Result<(), CommError> {
        self.start(to, tag, MessageMemory::Send(payload), Some(request))
    }

    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: ReceiveSlice,
        request: RequestId,
    ) -> Result<(), CommError> {
        self.start(from, tag, MessageMemory::Receive(place), Some(request))
    }

    fn poll(&mut self, events: &mut Vec<P2pEvent>) -> Result<(), CommError> {
        while let Some((from, bytes)) = self.control.next(&self.world)? {
            events.push(P2pEvent::Control { from, bytes });
        }
        self.messages.test_some(|message| {
            events.extend(message.request.map(P2pEvent::Completed));
        })
    }

    fn is_idle(&self) -> bool {
        self.messages.is_empty()
    }

    fn finish(self) -> Result<(), CommError> {
        self.control.finish()?;
        self.world.finish()
    }
}
