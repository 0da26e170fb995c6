//! The algorithms of the collectives, which determine the elements that each rank sends to other ranks in each round.
//!
//! In a round, each member sends at most one payload to each other member, and receives at most one payload from each
//! other member. No rank forwards data: each payload is sent directly from the rank that has it to the rank that needs
//! it.
//!
//! - A short all_reduce takes one round, in which each rank receives all inputs and reduces them. A long all_reduce
//!   consists of a reduce_scatter and an all_gather of the chunks (Rabenseifner 2004, doi:10.1007/978-3-540-24685-5_1).
//!   In a long all_reduce, a rank sends `2 n (size - 1) / size` elements instead of `n (size - 1)`.
//! - A long broadcast consists of a scatter and an all_gather (van de Geijn; Thakur, Rabenseifner and Gropp 2005,
//!   doi:10.1177/1094342005051521). The root sends `2 n (size - 1) / size` elements. In a tree, the root and each inner
//!   rank would send up to `n log2(size)` elements.
//! - All other collectives take one round.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::control::MAX_INLINE_BYTES;
use super::memory::{ReceiveBuffer, ReceiveSlice, SendSlice, detach};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, ReduceOp, Signature, consecutive_ranges};
use crate::communicator::Group;
use crate::engines::reduce::reduce_into;
use crate::pool::{BufferPool, PooledBuffer};

/// The maximum size in bytes of a broadcast in which the root sends all elements to every member.
const MAX_FLAT_BROADCAST_BYTES: usize = 64 << 10;

/// The messages of one round, indexed by the other member.
pub struct Round {
    pub sends: Vec<Option<SendSlice>>,
    pub receives: Vec<Option<ReceiveSlice>>,
    /// A function that is called when all messages of the round are complete.
    pub finish: Box<dyn FnOnce() -> RoundOutcome>,
}

pub enum RoundOutcome {
    Done(Buffer),
    Next(Round),
}

/// Returns the first round of a collective.
pub fn first_round(
    signature: &Signature,
    group: &Group,
    input: PooledBuffer,
    pool: &Arc<BufferPool>,
) -> Round {
    let builder = RoundBuilder {
        dtype: signature.dtype,
        len: signature.len,
        own: group.index(),
        size: group.size(),
        pool: Arc::clone(pool),
    };
    let call = match &signature.operation {
        Operation::Call(call) => call,
        Operation::Split { .. } => return builder.barrier(),
    };
    let bytes = builder.len * builder.dtype.size_of();
    match call {
        Call::AllReduce(op) if bytes <= MAX_INLINE_BYTES => builder.all_reduce_short(input, *op),
        Call::AllReduce(op) => builder.all_reduce_long(input, *op),
        Call::AllGather => {
            let ranges: Vec<_> = (0..builder.size)
                .map(|i| i * builder.len..(i + 1) * builder.len)
                .collect();
            builder.gather(Rc::new(input), &ranges)
        }
        Call::ReduceScatter(op) => builder.reduce_scatter(input, *op),
        Call::Broadcast { root } if bytes <= MAX_FLAT_BROADCAST_BYTES || builder.size == 2 => {
            builder.broadcast_short(input, *root)
        }
        Call::Broadcast { root } => builder.broadcast_long(input, *root),
        Call::AllToAll { send, receive } => builder.all_to_all(&Rc::new(input), send, receive),
        Call::Barrier => builder.barrier(),
        Call::Send { .. } | Call::Receive { .. } => {
            unreachable!("{} is not a collective", call.name())
        }
    }
}

/// A builder of the rounds of one member.
#[derive(Clone)]
struct RoundBuilder {
    dtype: DType,
    len: usize,
    own: usize,
    size: usize,
    pool: Arc<BufferPool>,
}

impl RoundBuilder {
    /// Calls `value` for each other member. Returns `None` at the index of this member.
    fn per_peer<T>(&self, value: impl Fn(usize) -> Option<T>) -> Vec<Option<T>> {
        let others = |index| {
            if index == self.own {
                None
            } else {
                value(index)
            }
        };
        (0..self.size).map(others).collect()
    }

    /// Returns the ranges of the chunks. If the elements cannot be divided evenly, the first chunks have one more
    /// element.
    fn chunks(&self) -> Vec<Range<usize>> {
        let (least, more) = (self.len / self.size, self.len % self.size);
        let start = |index: usize| index * least + index.min(more);
        (0..self.size)
            .map(|index| start(index)..start(index + 1))
            .collect()
    }

    fn allocate(&self, len: usize) -> PooledBuffer {
        PooledBuffer::new(self.pool.take(self.dtype, len), &self.pool)
    }

    /// Builds a barrier, in which control messages without payloads are sent.
    fn barrier(&self) -> Round {
        Round {
            sends: self.per_peer(|_| None),
            receives: self.per_peer(|_| None),
            finish: Box::new(|| RoundOutcome::Done(Buffer::empty(DType::U8))),
        }
    }

    /// Builds an all-gather, in which every member receives the pieces of all members. `piece` is the piece of this
    /// rank. `ranges` contains the position of each piece in the result.
    fn gather(&self, piece: Rc<PooledBuffer>, ranges: &[Range<usize>]) -> Round {
        let mut result = self.allocate(ranges[self.size - 1].end);
        result.copy_from(ranges[self.own].start, &piece, 0..piece.len());
        let (buffer, receives) = self.receive_from_peers(result, ranges);
        Round {
            sends: self.per_peer(|_| SendSlice::new(&piece, 0..piece.len())),
            receives,
            finish: Box::new(|| RoundOutcome::Done(detach(buffer.into_inner()))),
        }
    }

    /// Splits `buffer` into slices that receive the ranges from the other members.
    fn receive_from_peers(
        &self,
        buffer: PooledBuffer,
        ranges: &[Range<usize>],
    ) -> (ReceiveBuffer, Vec<Option<ReceiveSlice>>) {
        let numbered = ranges.iter().enumerate();
        let others = numbered.map(|(index, range)| {
            if index == self.own {
                range.start..range.start
            } else {
                range.clone()
            }
        });
        ReceiveBuffer::split(buffer, &others.collect::<Vec<_>>())
    }

    /// Builds a reduce-scatter, in which every member receives its own range from all members and reduces it.
    fn reduce(
        &self,
        input: PooledBuffer,
        ranges: &[Range<usize>],
        op: ReduceOp,
        finish: impl FnOnce(PooledBuffer) -> RoundOutcome + 'static,
    ) -> Round {
        let own = ranges[self.own].clone();
        let mut mine = self.allocate(own.len());
        mine.copy_from(0, &input, own.clone());
        let mut mine = Some(mine);
        let input = Rc::new(input);
        let (mut buffers, mut receives) = (Vec::new(), Vec::new());
        for index in 0..self.size {
            let (memory, place) = match mine.take_if(|_| index == self.own) {
                Some(mine) => (mine, 0..0),
                None => (self.allocate(own.len()), 0..own.len()),
            };
            let (buffer, place) = ReceiveBuffer::single(memory, place);
            buffers.push(buffer);
            receives.push(place);
        }
        Round {
            sends: self.per_peer(|index| SendSlice::new(&input, ranges[index].clone())),
            receives,
            finish: Box::new(move || finish(reduced(buffers, op))),
        }
    }

    fn all_reduce_short(&self, input: PooledBuffer, op: ReduceOp) -> Round {
        let whole = vec![0..self.len; self.size];
        self.reduce(input, &whole, op, |sum| RoundOutcome::Done(detach(sum)))
    }

    fn all_reduce_long(self, input: PooledBuffer, op: ReduceOp) -> Round {
        let chunks = self.chunks();
        let builder = self.clone();
        self.reduce(input, &chunks.clone(), op, move |sum| {
            RoundOutcome::Next(builder.gather(Rc::new(sum), &chunks))
        })
    }

    fn reduce_scatter(&self, input: PooledBuffer, op: ReduceOp) -> Round {
        self.reduce(input, &self.chunks(), op, |sum| {
            RoundOutcome::Done(detach(sum))
        })
    }

    /// Builds a broadcast in one round, in which the root sends all elements to every member.
    fn broadcast_short(&self, input: PooledBuffer, root: usize) -> Round {
        if self.own == root {
            let input = Rc::new(input);
            return Round {
                sends: self.per_peer(|_| SendSlice::new(&input, 0..self.len)),
                receives: self.per_peer(|_| None),
                finish: Box::new(|| RoundOutcome::Done(into_buffer(input))),
            };
        }
        let place = |index| if index == root { 0..self.len } else { 0..0 };
        // The input of this rank is not read, so its memory is used for the result.
        let (buffer, receives) =
            ReceiveBuffer::split(input, &(0..self.size).map(place).collect::<Vec<_>>());
        Round {
            sends: self.per_peer(|_| None),
            receives,
            finish: Box::new(|| RoundOutcome::Done(detach(buffer.into_inner()))),
        }
    }

    /// Builds a broadcast in two rounds. First the root scatters the chunks, and then all other members gather them.
    fn broadcast_long(self, input: PooledBuffer, root: usize) -> Round {
        let chunks = self.chunks();
        if self.own == root {
            return self.scatter(Rc::new(input), &chunks);
        }
        let own = chunks[self.own].len();
        let place = |index| if index == root { 0..own } else { 0..0 };
        let places: Vec<_> = (0..self.size).map(place).collect();
        let (buffer, receives) = ReceiveBuffer::split(self.allocate(own), &places);
        let sends = self.per_peer(|_| None);
        let finish = move || {
            let piece = Rc::new(buffer.into_inner());
            drop(input);
            let mut round = self.gather(piece, &chunks);
            round.sends[root] = None;
            RoundOutcome::Next(round)
        };
        Round {
            sends,
            receives,
            finish: Box::new(finish),
        }
    }

    fn scatter(self, input: Rc<PooledBuffer>, chunks: &[Range<usize>]) -> Round {
        let own = chunks[self.own].clone();
        let sends = self.per_peer(|index| SendSlice::new(&input, chunks[index].clone()));
        let receives = self.per_peer(|_| None);
        let finish = move || {
            let round = Round {
                sends: self.per_peer(|_| SendSlice::new(&input, own.clone())),
                receives: self.per_peer(|_| None),
                finish: Box::new(|| RoundOutcome::Done(into_buffer(input))),
            };
            RoundOutcome::Next(round)
        };
        Round {
            sends,
            receives,
            finish: Box::new(finish),
        }
    }

    fn all_to_all(&self, input: &Rc<PooledBuffer>, send: &[usize], receive: &[usize]) -> Round {
        let (from, to) = (consecutive_ranges(send), consecutive_ranges(receive));
        let mut result = self.allocate(to[self.size - 1].end);
        result.copy_from(to[self.own].start, input, from[self.own].clone());
        let (buffer, receives) = self.receive_from_peers(result, &to);
        Round {
            sends: self.per_peer(|index| SendSlice::new(input, from[index].clone())),
            receives,
            finish: Box::new(|| RoundOutcome::Done(detach(buffer.into_inner()))),
        }
    }
}

/// Reduces the received buffers in group order. The result uses the memory of the first buffer.
fn reduced(buffers: Vec<ReceiveBuffer>, op: ReduceOp) -> PooledBuffer {
    let mut contributions = buffers.into_iter().map(ReceiveBuffer::into_inner);
    let mut first = contributions.next().expect("a group has members");
    let rest: Vec<PooledBuffer> = contributions.collect();
    reduce_into(
        &mut first,
        &rest.iter().map(|lent| &**lent).collect::<Vec<_>>(),
        op,
    );
    first
}

/// Returns the buffer that was sent. All slices of the buffer must have been sent.
fn into_buffer(input: Rc<PooledBuffer>) -> Buffer {
    detach(Rc::into_inner(input).expect("all slices of the input are dropped"))
}
