//! An in-memory transport that delays and reorders messages as MPI is allowed to.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::engines::p2p_collectives::{
    MAX_CONTROL_BYTES, P2pEvent, P2pTransport, ReceiveSlice, RequestId, SendSlice, Tag,
};
use crate::error::CommError;

/// A payload, and whether it has been received.
type QueuedPayload = (Vec<u8>, Arc<AtomicBool>);

/// The messages in flight between the ranks.
#[derive(Default)]
struct NetworkState {
    /// The control messages, indexed by receiver and keyed by sender.
    notes: Vec<BTreeMap<usize, VecDeque<Vec<u8>>>>,
    /// The payloads, keyed by sender, receiver and tag.
    payloads: HashMap<(usize, usize, Tag), VecDeque<QueuedPayload>>,
    /// The size of the longest payload so far.
    longest: usize,
}

/// The in-memory transports of all ranks of a world.
#[derive(Clone)]
pub struct MemoryNetwork {
    state: Arc<Mutex<NetworkState>>,
    size: usize,
    /// The probability, in quarters, that a transport delays a message that it could deliver.
    delay_rate: u64,
    /// If set, every poll fails.
    pub broken: Arc<AtomicBool>,
}

pub struct MemoryP2p {
    network: MemoryNetwork,
    rank: usize,
    receives: Vec<(usize, Tag, ReceiveSlice, RequestId)>,
    sends: Vec<(Arc<AtomicBool>, SendSlice, RequestId)>,
    random: u64,
}

impl MemoryNetwork {
    pub fn new(size: usize, delay_rate: u64) -> Self {
        let state = NetworkState {
            notes: vec![BTreeMap::new(); size],
            ..NetworkState::default()
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            size,
            delay_rate,
            broken: Arc::default(),
        }
    }

    pub fn transport(&self, rank: usize) -> MemoryP2p {
        MemoryP2p {
            network: self.clone(),
            rank,
            receives: Vec::new(),
            sends: Vec::new(),
            random: rank as u64 + 1,
        }
    }

    /// Returns the number of control messages and payloads that were not received.
    pub fn left(&self) -> usize {
        let state = self.state.lock().unwrap();
        let notes = state.notes.iter().flat_map(BTreeMap::values);
        let payloads = state.payloads.values().map(VecDeque::len);
        notes.map(VecDeque::len).chain(payloads).sum()
    }

    /// Returns the size in bytes of the longest payload that was sent as a separate message.
    pub fn longest(&self) -> usize {
        self.state.lock().unwrap().longest
    }
}

impl MemoryP2p {
    fn random(&mut self) -> u64 {
        self.random = self
            .random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        self.random >> 33
    }

    fn is_delayed(&mut self) -> bool {
        self.random() % 4 < self.network.delay_rate
    }

    /// Returns the control messages that are delivered now. Messages from the same sender are delivered in order.
    fn notes(&mut self) -> Vec<P2pEvent> {
        let network = self.network.clone();
        let mut state = network.state.lock().unwrap();
        let mut events = Vec::new();
        for (from, queue) in &mut state.notes[self.rank] {
            while !self.is_delayed()
                && let Some(bytes) = queue.pop_front()
            {
                events.push(P2pEvent::Control { from: *from, bytes });
            }
        }
        events
    }
}

impl P2pTransport for MemoryP2p {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.network.size
    }

    fn send_control(&mut self, to: usize, bytes: Vec<u8>) -> Result<(), CommError> {
        assert!(bytes.len() <= MAX_CONTROL_BYTES);
        let mut state = self.network.state.lock().unwrap();
        state.notes[to]
            .entry(self.rank)
            .or_default()
            .push_back(bytes);
        Ok(())
    }

    fn send(
        &mut self,
        to: usize,
        tag: Tag,
        payload: SendSlice,
        request: RequestId,
    ) -> Result<(), CommError> {
        let taken = Arc::new(AtomicBool::new(false));
        let mut state = self.network.state.lock().unwrap();
        state.longest = state.longest.max(payload.bytes().len());
        let queue = state.payloads.entry((self.rank, to, tag)).or_default();
        queue.push_back((payload.bytes().to_vec(), Arc::clone(&taken)));
        self.sends.push((taken, payload, request));
        Ok(())
    }

    fn receive(
        &mut self,
        from: usize,
        tag: Tag,
        place: ReceiveSlice,
        request: RequestId,
    ) -> Result<(), CommError> {
        self.receives.push((from, tag, place, request));
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<P2pEvent>) -> Result<(), CommError> {
        if self.network.broken.load(Ordering::Acquire) {
            return Err(CommError::Engine {
                engine: "memory".to_owned(),
                message: "the transport is broken".to_owned(),
            });
        }
        events.append(&mut self.notes());
        for (from, tag, place, request) in std::mem::take(&mut self.receives) {
            let lazy = self.is_delayed();
            let mut state = self.network.state.lock().unwrap();
            let queue = state.payloads.entry((from, self.rank, tag)).or_default();
            match if lazy { None } else { queue.pop_front() } {
                None => self.receives.push((from, tag, place, request)),
                Some((bytes, taken)) => {
                    place.fill(&bytes);
                    taken.store(true, Ordering::Release);
                    events.push(P2pEvent::Completed(request));
                }
            }
        }
        self.sends.retain(|(taken, _, request)| {
            let taken = taken.load(Ordering::Acquire);
            if taken {
                events.push(P2pEvent::Completed(*request));
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
