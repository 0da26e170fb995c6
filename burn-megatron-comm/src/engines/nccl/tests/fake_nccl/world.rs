//! The ranks of a fake communicator, and the exchange of data between them.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::c_int;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// The ranks of a communicator.
#[derive(Default)]
pub struct FakeWorld {
    pub size: usize,
    pub state: Mutex<WorldState>,
    pub condvar: Condvar,
    pub aborted: AtomicBool,
    /// The error code that every communicator reports, or the code for success.
    pub error: AtomicI32,
}

#[derive(Default)]
pub struct WorldState {
    pub joined: usize,
    pub finalized: usize,
    sync_points: HashMap<usize, SyncPoint>,
    messages: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// The ranks that have launched a message, and the launches that wait for the other ranks.
    connected: HashSet<usize>,
    connecting: Vec<Box<dyn FnOnce() + Send>>,
    /// The parts of each split, by number and color.
    pub parts: HashMap<(usize, c_int), Arc<FakeWorld>>,
}

/// The inputs of the ranks, and the number of ranks that have taken all inputs.
type SyncPoint = (Vec<Option<Arc<Vec<u8>>>>, usize);

impl FakeWorld {
    pub fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            size,
            ..Self::default()
        })
    }

    /// Exchanges the inputs of all ranks in collective `number`. Returns `None` if the collective was aborted.
    pub fn all_exchange(
        &self,
        number: usize,
        rank: usize,
        brought: Vec<u8>,
    ) -> Option<Vec<Arc<Vec<u8>>>> {
        let mut state = self.state.lock().unwrap();
        let size = self.size;
        let sync_point = state.sync_points.entry(number);
        let sync_point = sync_point.or_insert_with(|| (vec![None; size], 0));
        assert!(sync_point.0[rank].is_none(), "rank {rank} came twice");
        sync_point.0[rank] = Some(Arc::new(brought));
        self.condvar.notify_all();
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return None;
            }
            let sync_point = state.sync_points.get_mut(&number).unwrap();
            if let Some(all) = sync_point.0.iter().cloned().collect::<Option<Vec<_>>>() {
                sync_point.1 += 1;
                if sync_point.1 == size {
                    state.sync_points.remove(&number);
                }
                return Some(all);
            }
            state = self.condvar.wait(state).unwrap();
        }
    }

    /// Calls `launched` after all ranks have launched a message. The first message connects the ranks.
    pub fn connect(&self, rank: usize, launched: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock().unwrap();
        state.connected.insert(rank);
        state.connecting.push(Box::new(launched));
        if state.connected.len() == self.size {
            let ready = mem::take(&mut state.connecting);
            drop(state);
            ready.into_iter().for_each(|launched| launched());
        }
    }

    pub fn post(&self, from: usize, to: usize, message: Vec<u8>) {
        let mut state = self.state.lock().unwrap();
        let queue = state.messages.entry((from, to)).or_default();
        queue.push_back(message);
        self.condvar.notify_all();
    }

    pub fn collect(&self, from: usize, to: usize) -> Option<Vec<u8>> {
        let mut state = self.state.lock().unwrap();
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(message) = state.messages.entry((from, to)).or_default().pop_front() {
                self.condvar.notify_all();
                return Some(message);
            }
            state = self.condvar.wait(state).unwrap();
        }
    }

    pub fn wait_until_received(&self, from: usize, to: usize) {
        let mut state = self.state.lock().unwrap();
        while !self.aborted.load(Ordering::SeqCst)
            && !state.messages.entry((from, to)).or_default().is_empty()
        {
            state = self.condvar.wait(state).unwrap();
        }
    }
}
