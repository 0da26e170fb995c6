//! Copies that run on their own, and who waits for them.
//!
//! A copy moves nothing when it is issued. It does so when a thread waits for it, which is as late
//! as the rules allow: memory that is read without a wait still holds what it held before.

use std::collections::{HashMap, VecDeque};

use super::{Block, Fault, LANES, Warp};
use crate::ptx::Space;

/// Bytes that move between global and shared memory.
#[derive(Clone, Copy, Debug)]
pub struct CopyChunk {
    /// Which way they go.
    pub way: CopyDirection,
    /// Their address in global memory.
    pub global: u64,
    /// Their address in shared memory.
    pub shared: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug)]
pub enum CopyDirection {
    /// From global to shared memory.
    In,
    /// Zeros to shared memory.
    Zero,
    /// From shared to global memory.
    Out,
    /// From shared memory, combined with what lies in global memory: the first argument becomes
    /// the result.
    Reduce(fn(&mut [u8], &[u8])),
}

/// The copies of a thread, in the order of issue.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    pieces: VecDeque<CopyChunk>,
    /// The number of pieces that are done.
    done: u64,
    /// The number of pieces issued up to the end of each group.
    groups: VecDeque<u64>,
    /// The bytes that were read from shared memory, and are not written yet.
    read: VecDeque<(CopyChunk, Vec<u8>)>,
    /// The same as `groups`, for those whose bytes are read.
    unwritten: VecDeque<u64>,
}

/// Something that arrives at an mbarrier when copies are done.
#[derive(Clone, Debug)]
pub enum Arrival {
    /// Copies of a thread: the number of pieces that it had issued.
    Thread(usize, u64),
    /// Copies by themselves, and the bytes that they count as.
    Bytes(Vec<CopyChunk>, u32),
}

/// All copies of a block that are not done.
#[derive(Clone, Debug, Default)]
pub struct Asynchronous {
    /// `cp.async` by thread.
    pub copies: Queues,
    /// `cp.async.bulk` with a `bulk_group`, by thread.
    pub bulk: Queues,
    /// The arrivals to come at the mbarrier at an address.
    pub arrivals: HashMap<u64, Vec<Arrival>>,
    /// The number of times that threads have in vain asked for the end of a phase, with nothing else between.
    pub polls: u32,
}

/// A queue for each thread.
#[derive(Clone, Debug, Default)]
pub struct Queues(Vec<Queue>);

/// The number of a thread in its block.
pub fn thread(warp: &Warp, lane: usize) -> usize {
    warp.number * LANES + lane
}

impl Queues {
    /// A thread's queue.
    pub fn of(&mut self, thread: usize) -> &mut Queue {
        if self.0.len() <= thread {
            self.0.resize_with(thread + 1, Queue::default);
        }
        &mut self.0[thread]
    }
}

impl Queue {
    /// Issues a copy.
    pub fn push(&mut self, piece: CopyChunk) {
        self.pieces.push_back(piece);
    }

    /// Closes a group.
    pub fn commit(&mut self) {
        self.groups.push_back(self.issued());
    }

    /// Returns the number of pieces so far.
    pub fn issued(&self) -> u64 {
        self.done + self.pieces.len() as u64
    }

    /// The pieces of all groups but the latest `pending`, which are done with this. Their groups
    /// are told apart by how many pieces there were up to their ends.
    fn due(&mut self, pending: usize) -> Vec<CopyChunk> {
        let mut end = self.done;
        while self.groups.len() > pending {
            end = self.groups.pop_front().unwrap_or(end);
            self.unwritten.push_back(end);
        }
        self.up_to(end)
    }

    /// The pieces up to a number, which are done with this.
    pub fn up_to(&mut self, end: u64) -> Vec<CopyChunk> {
        let count = end.saturating_sub(self.done) as usize;
        self.done += count as u64;
        self.pieces.drain(..count).collect()
    }
}

impl Block<'_> {
    /// Whether the addresses of a copy that is issued may be touched.
    pub(crate) fn check_piece(&self, lane: usize, piece: &CopyChunk) -> Result<(), Fault> {
        if !matches!(piece.way, CopyDirection::Zero) {
            self.global(lane, piece.global, piece.bytes)?;
        }
        let size = self.shared.bytes.len();
        match piece.shared.checked_add(piece.bytes as u64) {
            Some(end) if end <= size as u64 => Ok(()),
            _ => Err(Fault::Address {
                lane,
                space: Space::Shared,
                address: piece.shared,
                bytes: piece.bytes,
                what: format!("there are {size} bytes"),
            }),
        }
    }

    /// Does the `cp.async` of a lane up to its latest `pending` groups.
    pub(crate) fn wait_copies(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        pending: usize,
    ) -> Result<(), Fault> {
        let queue = self.asynchronous.copies.of(thread(warp, lane));
        let due = queue.due(pending);
        queue.unwritten.clear();
        due.iter()
            .try_for_each(|piece| self.perform(warp, lane, piece))
    }

    /// Reads the sources of a lane's bulk copies up to its latest `pending` groups.
    pub(crate) fn wait_read(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        pending: usize,
    ) -> Result<(), Fault> {
        let due = self.asynchronous.bulk.of(thread(warp, lane)).due(pending);
        for piece in due {
            let mut bytes = vec![0; piece.bytes];
            self.fetch(warp, lane, Space::Shared, piece.shared, &mut bytes)?;
            let queue = self.asynchronous.bulk.of(thread(warp, lane));
            queue.read.push_back((piece, bytes));
        }
        Ok(())
    }

    /// Does a lane's bulk copies up to its latest `pending` groups.
    pub(crate) fn wait_bulk(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        pending: usize,
    ) -> Result<(), Fault> {
        self.wait_read(warp, lane, pending)?;
        let queue = self.asynchronous.bulk.of(thread(warp, lane));
        // Bulk groups that are read and not written come before all that are not read.
        let mut left = queue.unwritten.len() + queue.groups.len();
        let mut end = 0;
        while left > pending
            && let Some(group) = queue.unwritten.pop_front()
        {
            end = group;
            left -= 1;
        }
        let first = queue.done - queue.read.len() as u64;
        let count = end.saturating_sub(first) as usize;
        let due: Vec<_> = queue.read.drain(..count).collect();
        due.iter()
            .try_for_each(|(piece, bytes)| self.write_out(warp, lane, piece, bytes))
    }

    fn write_out(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        piece: &CopyChunk,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let CopyDirection::Reduce(combine) = piece.way else {
            return self.put(warp, lane, Space::Global, piece.global, bytes);
        };
        let mut there = vec![0; piece.bytes];
        self.fetch(warp, lane, Space::Global, piece.global, &mut there)?;
        combine(&mut there, bytes);
        self.put(warp, lane, Space::Global, piece.global, &there)
    }

    /// Does one copy to shared memory.
    pub(crate) fn perform(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        piece: &CopyChunk,
    ) -> Result<(), Fault> {
        // Most are no longer than this.
        let (mut few, mut many) = ([0; 16], Vec::new());
        let bytes = if piece.bytes <= few.len() {
            &mut few[..piece.bytes]
        } else {
            many.resize(piece.bytes, 0);
            &mut many[..]
        };
        if !matches!(piece.way, CopyDirection::Zero) {
            self.fetch(warp, lane, Space::Global, piece.global, bytes)?;
        }
        self.put(warp, lane, Space::Shared, piece.shared, bytes)
    }

    /// Reads any number of bytes.
    fn fetch(
        &mut self,
        warp: &Warp,
        lane: usize,
        space: Space,
        address: u64,
        bytes: &mut [u8],
    ) -> Result<(), Fault> {
        let mut at = 0;
        while at < bytes.len() {
            let size = step(address + at as u64, bytes.len() - at);
            self.read(
                warp,
                lane,
                space,
                address + at as u64,
                &mut bytes[at..at + size],
            )?;
            at += size;
        }
        Ok(())
    }

    /// Writes any number of bytes.
    fn put(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        space: Space,
        address: u64,
        bytes: &[u8],
    ) -> Result<(), Fault> {
        let mut at = 0;
        while at < bytes.len() {
            let size = step(address + at as u64, bytes.len() - at);
            self.write(
                warp,
                lane,
                space,
                address + at as u64,
                &bytes[at..at + size],
            )?;
            at += size;
        }
        Ok(())
    }

    /// The end of the block: copies to global memory get there, if their sources are read.
    ///
    /// # Errors
    ///
    /// Bulk copies that still need shared memory. (`cp.async` that nobody waits for is allowed.)
    pub(super) fn end(&mut self, warp: &mut Warp) -> Result<(), Fault> {
        let undefined = |what: String| Err(Fault::Undefined(what));
        let loads = self.asynchronous.arrivals.values().flatten();
        let loads = loads
            .filter(|arrival| matches!(arrival, Arrival::Bytes(..)))
            .count();
        if loads > 0 {
            return undefined(format!(
                "the block ends before {loads} bulk copies to its shared memory do"
            ));
        }
        for queue in std::mem::take(&mut self.asynchronous.bulk).0 {
            if !queue.pieces.is_empty() {
                return undefined(
                    "the block ends before bulk copies from its shared memory are read".into(),
                );
            }
            for (piece, bytes) in queue.read {
                self.write_out(warp, 0, &piece, &bytes)?;
            }
        }
        Ok(())
    }
}

/// The longest access that fits an address and a length.
fn step(address: u64, bytes: usize) -> usize {
    let aligned = 1 << address.trailing_zeros().min(4);
    aligned.min(1 << bytes.ilog2())
}
