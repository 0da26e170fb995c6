//! Asynchronous copies, and the threads that wait for them.
//!
//! A copy moves no data when it is issued. It moves its data when a thread waits for it, which is the latest time
//! that the rules allow. A program that reads the memory without a wait therefore reads the old content.

use std::collections::{HashMap, VecDeque};

use super::{Block, Fault, LANES, Warp};
use crate::ptx::Space;

/// A chunk of bytes that moves between global and shared memory.
#[derive(Clone, Copy, Debug)]
pub struct CopyChunk {
    /// The direction.
    pub way: CopyDirection,
    /// The address in global memory.
    pub global: u64,
    /// The address in shared memory.
    pub shared: u64,
    /// The number of bytes.
    pub bytes: usize,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug)]
pub enum CopyDirection {
    /// From global to shared memory.
    In,
    /// Zeros into shared memory.
    Zero,
    /// From shared to global memory.
    Out,
    /// From shared memory, combined with the content of global memory. The function stores the result in its first
    /// argument.
    Reduce(fn(&mut [u8], &[u8])),
}

/// The copies of a thread, in the order of issue.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    pieces: VecDeque<CopyChunk>,
    /// The number of chunks that are done.
    done: u64,
    /// The number of chunks that were issued up to the end of each group.
    groups: VecDeque<u64>,
    /// The bytes that were read from shared memory but not yet written.
    read: VecDeque<(CopyChunk, Vec<u8>)>,
    /// The same as `groups`, for groups that were read but not yet written.
    unwritten: VecDeque<u64>,
}

/// An arrival at an mbarrier that happens when copies are done.
#[derive(Clone, Debug)]
pub enum Arrival {
    /// Copies of a thread: the number of the thread, and the number of chunks that it had issued.
    Thread(usize, u64),
    /// Bulk copies, and the number of bytes that they count.
    Bytes(Vec<CopyChunk>, u32),
}

/// All pending copies of a block.
#[derive(Clone, Debug, Default)]
pub struct Asynchronous {
    /// `cp.async` copies by thread.
    pub copies: Queues,
    /// `cp.async.bulk` copies with a `bulk_group`, by thread.
    pub bulk: Queues,
    /// The pending arrivals at the mbarrier of each address.
    pub arrivals: HashMap<u64, Vec<Arrival>>,
    /// The number of unsuccessful queries for the end of a phase since the last change of a barrier.
    pub polls: u32,
}

/// A queue for each thread.
#[derive(Clone, Debug, Default)]
pub struct Queues(Vec<Queue>);

/// Returns the number of a thread in its block.
pub fn thread(warp: &Warp, lane: usize) -> usize {
    warp.number * LANES + lane
}

impl Queues {
    /// Returns the queue of a thread.
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

    /// Returns the number of chunks issued so far.
    pub fn issued(&self) -> u64 {
        self.done + self.pieces.len() as u64
    }

    /// Removes and returns the chunks of all groups except the latest `pending`. A group is identified by the number
    /// of chunks at its end.
    fn due(&mut self, pending: usize) -> Vec<CopyChunk> {
        let mut end = self.done;
        while self.groups.len() > pending {
            end = self.groups.pop_front().unwrap_or(end);
            self.unwritten.push_back(end);
        }
        self.up_to(end)
    }

    /// Removes and returns the chunks up to a number.
    pub fn up_to(&mut self, end: u64) -> Vec<CopyChunk> {
        let count = end.saturating_sub(self.done) as usize;
        self.done += count as u64;
        self.pieces.drain(..count).collect()
    }
}

impl Block<'_> {
    /// Checks whether the addresses of a copy may be accessed. This happens at the issue of the copy.
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

    /// Executes the `cp.async` copies of a lane, except the latest `pending` groups.
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

    /// Reads the sources of a lane's bulk copies, except the latest `pending` groups.
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

    /// Executes a lane's bulk copies, except the latest `pending` groups.
    pub(crate) fn wait_bulk(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        pending: usize,
    ) -> Result<(), Fault> {
        self.wait_read(warp, lane, pending)?;
        let queue = self.asynchronous.bulk.of(thread(warp, lane));
        // Bulk groups that were read but not written are older than all groups that were not read.
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

    /// Executes a copy to shared memory.
    pub(crate) fn perform(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        piece: &CopyChunk,
    ) -> Result<(), Fault> {
        // Most copies are at most this long.
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

    /// Ends the block. Copies to global memory are written if their sources were read.
    ///
    /// # Errors
    ///
    /// Returns an error if bulk copies still need shared memory. `cp.async` copies without a wait are allowed.
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

/// Returns the size of the longest access that an address and a length allow.
fn step(address: u64, bytes: usize) -> usize {
    let aligned = 1 << address.trailing_zeros().min(4);
    aligned.min(1 << bytes.ilog2())
}
