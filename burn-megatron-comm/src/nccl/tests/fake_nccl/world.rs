//! The ranks of a communicator, and where they meet.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// The ranks of a communicator.
#[derive(Default)]
pub struct FakeWorld {
    pub size: usize,
    pub state: Mutex<WorldState>,
    pub bell: Condvar,
    pub aborted: AtomicBool,
    /// What every communicator reports, if not success.
    pub error: AtomicI32,
}

#[derive(Default)]
pub struct WorldState {
    pub joined: usize,
    pub finalized: usize,
    meetings: HashMap<usize, Meeting>,
    messages: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// The parts of each split by number and colour.
    pub parts: HashMap<(usize, c_int), Arc<FakeWorld>>,
}

/// What the ranks have brought, and how many have taken it.
type Meeting = (Vec<Option<Arc<Vec<u8>>>>, usize);

impl FakeWorld {
    pub fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            size,
            ..Self::default()
        })
    }

    /// What all ranks bring to a meeting; none if it was aborted.
    pub fn meet(&self, number: usize, rank: usize, brought: Vec<u8>) -> Option<Vec<Arc<Vec<u8>>>> {
        let mut state = self.state.lock().unwrap();
        let size = self.size;
        let meeting = state.meetings.entry(number);
        let meeting = meeting.or_insert_with(|| (vec![None; size], 0));
        assert!(meeting.0[rank].is_none(), "rank {rank} came twice");
        meeting.0[rank] = Some(Arc::new(brought));
        self.bell.notify_all();
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return None;
            }
            let meeting = state.meetings.get_mut(&number).unwrap();
            if let Some(all) = meeting.0.iter().cloned().collect::<Option<Vec<_>>>() {
                meeting.1 += 1;
                if meeting.1 == size {
                    state.meetings.remove(&number);
                }
                return Some(all);
            }
            state = self.bell.wait(state).unwrap();
        }
    }

    pub fn post(&self, from: usize, to: usize, message: Vec<u8>) {
        let mut state = self.state.lock().unwrap();
        let queue = state.messages.entry((from, to)).or_default();
        queue.push_back(message);
        self.bell.notify_all();
    }

    pub fn collect(&self, from: usize, to: usize) -> Option<Vec<u8>> {
        let mut state = self.state.lock().unwrap();
        loop {
            if self.aborted.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(message) = state.messages.entry((from, to)).or_default().pop_front() {
                self.bell.notify_all();
                return Some(message);
            }
            state = self.bell.wait(state).unwrap();
        }
    }

    pub fn await_taken(&self, from: usize, to: usize) {
        let mut state = self.state.lock().unwrap();
        while !self.aborted.load(Ordering::SeqCst)
            && !state.messages.entry((from, to)).or_default().is_empty()
        {
            state = self.bell.wait(state).unwrap();
        }
    }
}
