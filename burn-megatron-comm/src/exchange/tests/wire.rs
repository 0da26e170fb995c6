//! A wire in memory, which delays and reorders what MPI may delay and reorder.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::CommError;
use crate::exchange::{Event, Incoming, NOTE, Outgoing, Tag, Ticket, Wire};

/// A payload, and whether it has been taken.
type Parcel = (Vec<u8>, Arc<AtomicBool>);

/// What lies between the ranks.
#[derive(Default)]
struct Between {
    /// By receiver and sender.
    notes: Vec<BTreeMap<usize, VecDeque<Vec<u8>>>>,
    /// By sender, receiver and tag.
    parcels: HashMap<(usize, usize, Tag), VecDeque<Parcel>>,
    /// The longest payload that was seen.
    longest: usize,
}

/// The wires of a world.
#[derive(Clone)]
pub struct Hub {
    between: Arc<Mutex<Between>>,
    size: usize,
    /// How many times in four a wire does nothing with something it has.
    laziness: u64,
    /// Fails every poll from then on.
    pub broken: Arc<AtomicBool>,
}

pub struct MemoryWire {
    hub: Hub,
    rank: usize,
    receives: Vec<(usize, Tag, Incoming, Ticket)>,
    sends: Vec<(Arc<AtomicBool>, Outgoing, Ticket)>,
    random: u64,
}

impl Hub {
    pub fn new(size: usize, laziness: u64) -> Self {
        let between = Between {
            notes: vec![BTreeMap::new(); size],
            ..Between::default()
        };
        Self {
            between: Arc::new(Mutex::new(between)),
            size,
            laziness,
            broken: Arc::default(),
        }
    }

    pub fn wire(&self, rank: usize) -> MemoryWire {
        MemoryWire {
            hub: self.clone(),
            rank,
            receives: Vec::new(),
            sends: Vec::new(),
            random: rank as u64 + 1,
        }
    }

    /// The notes and payloads that nobody has taken.
    pub fn left(&self) -> usize {
        let between = self.between.lock().unwrap();
        let notes = between.notes.iter().flat_map(BTreeMap::values);
        let parcels = between.parcels.values().map(VecDeque::len);
        notes.map(VecDeque::len).chain(parcels).sum()
    }

    /// The longest payload that ever travelled by itself, in bytes.
    pub fn longest(&self) -> usize {
        self.between.lock().unwrap().longest
    }
}

impl MemoryWire {
    fn random(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.random >> 33
    }

    fn is_lazy(&mut self) -> bool {
        self.random() % 4 < self.hub.laziness
    }

    /// The notes that are let through, those of one sender in order.
    fn notes(&mut self) -> Vec<Event> {
        let hub = self.hub.clone();
        let mut between = hub.between.lock().unwrap();
        let mut events = Vec::new();
        for (from, queue) in &mut between.notes[self.rank] {
            while !self.is_lazy()
                && let Some(bytes) = queue.pop_front()
            {
                events.push(Event::Note { from: *from, bytes });
            }
        }
        events
    }
}

impl Wire for MemoryWire {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.hub.size
    }

    fn note(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError> {
        assert!(bytes.len() <= NOTE);
        let mut between = self.hub.between.lock().unwrap();
        between.notes[to]
            .entry(self.rank)
            .or_default()
            .push_back(bytes);
        Ok(())
    }

    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: Outgoing,
        ticket: Ticket,
    ) -> Result<(), CommError> {
        let taken = Arc::new(AtomicBool::new(false));
        let mut between = self.hub.between.lock().unwrap();
        between.longest = between.longest.max(payload.bytes().len());
        let queue = between.parcels.entry((self.rank, to, tag)).or_default();
        queue.push_back((payload.bytes().to_vec(), Arc::clone(&taken)));
        self.sends.push((taken, payload, ticket));
        Ok(())
    }

    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: Incoming,
        ticket: Ticket,
    ) -> Result<(), CommError> {
        self.receives.push((from, tag, place, ticket));
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), CommError> {
        if self.hub.broken.load(Ordering::Acquire) {
            return Err(CommError::Engine {
                engine: "memory".to_owned(),
                message: "the wire is broken".to_owned(),
            });
        }
        events.append(&mut self.notes());
        for (from, tag, place, ticket) in std::mem::take(&mut self.receives) {
            let lazy = self.is_lazy();
            let mut between = self.hub.between.lock().unwrap();
            let queue = between.parcels.entry((from, self.rank, tag)).or_default();
            match if lazy { None } else { queue.pop_front() } {
                None => self.receives.push((from, tag, place, ticket)),
                Some((bytes, taken)) => {
                    place.fill(&bytes);
                    taken.store(true, Ordering::Release);
                    events.push(Event::Done(ticket));
                }
            }
        }
        self.sends.retain(|(taken, _, ticket)| {
            let taken = taken.load(Ordering::Acquire);
            if taken {
                events.push(Event::Done(*ticket));
            }
            !taken
        });
        Ok(())
    }

    fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.receives.is_empty()
    }

    fn finish(self) -> Result<(), CommError> {
        assert!(self.is_idle());
        Ok(())
    }
}
