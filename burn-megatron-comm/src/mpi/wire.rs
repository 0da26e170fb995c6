//! MPI as a [`Wire`].

use ::mpi::environment::Threading;

use super::raw::{Flight, Flights, Inbox, Memory, World};
use crate::error::CommError;
use crate::exchange::{Event, Incoming, NOTE, Outgoing, Tag, Ticket, Wire};

/// Receives that are posted for notes. If more come before this rank looks, MPI keeps them.
const INBOX: usize = 32;

pub(super) struct MpiWire {
    /// Declared first, so that no flight outlives the memory of the others by a panic in between.
    flights: Flights,
    inbox: Inbox,
    world: World,
    largest: usize,
}

impl MpiWire {
    /// Starts MPI; payloads longer than `largest` bytes go in pieces.
    pub fn open(largest: usize) -> Result<Self, CommError> {
        let world = World::open()?;
        Ok(Self {
            flights: Flights::new(),
            inbox: Inbox::open(&world, INBOX)?,
            world,
            largest,
        })
    }

    /// What MPI promises to a process of several threads, in words.
    pub fn threads(&self) -> &'static str {
        match self.world.threading {
            Threading::Single => "thread level single",
            Threading::Funneled => "thread level funneled",
            Threading::Serialized => "thread level serialized",
            Threading::Multiple => "thread level multiple",
        }
    }

    fn launch(
        &mut self,
        peer: usize,
        tag: Tag,
        memory: Memory,
        ticket: Option<Ticket>,
    ) -> Result<(), CommError> {
        let flight = Flight {
            memory,
            peer,
            ticket,
        };
        // A note is short, and read as a whole.
        let largest = match flight.memory {
            Memory::Note(_) => NOTE,
            Memory::Payload(_) | Memory::Place(_) => self.largest,
        };
        self.flights.launch(&self.world, flight, tag, largest)
    }
}

impl Wire for MpiWire {
    fn rank(&self) -> usize {
        self.world.rank
    }

    fn size(&self) -> usize {
        self.world.size
    }

    fn note(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError> {
        self.launch(to, 0, Memory::Note(bytes), None)
    }

    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: Outgoing,
        ticket: Ticket,
    ) -> Result<(), CommError> {
        self.launch(to, tag, Memory::Payload(payload), Some(ticket))
    }

    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: Incoming,
        ticket: Ticket,
    ) -> Result<(), CommError> {
        self.launch(from, tag, Memory::Place(place), Some(ticket))
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), CommError> {
        while let Some((from, bytes)) = self.inbox.next(&self.world)? {
            events.push(Event::Note { from, bytes });
        }
        self.flights.land(|flight| {
            events.extend(flight.ticket.map(Event::Done));
        })
    }

    fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    fn finish(self) -> Result<(), CommError> {
        self.inbox.finish()?;
        self.world.finish()
    }
}
