//! Which elements go where, round by round, for each collective.
//!
//! In a round every member sends at most one payload to every other member and takes at most one from it.
//! Nothing is forwarded: each payload travels once, from the rank that has it to the rank that needs it.
//!
//! - A short all_reduce is one round in which all get everything and reduce for themselves. A long one is
//!   a reduce_scatter followed by an all_gather of the chunks (Rabenseifner 2004,
//!   doi:10.1007/978-3-540-24685-5_1): a rank sends `2 n (size - 1) / size` elements, not `n (size - 1)`.
//! - A long broadcast is a scatter followed by an all_gather (van de Geijn; Thakur, Rabenseifner and Gropp
//!   2005, doi:10.1177/1094342005051521): the root sends `2 n (size - 1) / size` elements, where a tree
//!   would keep it and each rank in the middle busy for `n log2(size)`.
//! - All others need one round.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use super::header::INLINE;
use super::memory::{Incoming, Landing, Outgoing, keep};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, ReduceOp, Signature};
use crate::communicator::Group;
use crate::pool::{BufferPool, Lent};
use crate::reduce::reduce_into;

/// Bytes up to which the root of a broadcast sends everything to everybody.
const SHORT_BROADCAST: usize = 64 << 10;

/// The messages of one round, by the index of the other member, and what follows it.
pub struct Round {
    pub gives: Vec<Option<Outgoing>>,
    pub takes: Vec<Option<Incoming>>,
    /// To be called when every message of the round is complete.
    pub then: Box<dyn FnOnce() -> Outcome>,
}

pub enum Outcome {
    Done(Buffer),
    Again(Round),
}

/// The first round of a collective.
pub fn first_round(
    signature: &Signature,
    group: &Group,
    input: Lent,
    pool: &Arc<BufferPool>,
) -> Round {
    let part = Part {
        dtype: signature.dtype,
        len: signature.len,
        own: group.index(),
        size: group.size(),
        pool: Arc::clone(pool),
    };
    let call = match &signature.operation {
        Operation::Call(call) => call,
        Operation::Split { .. } => return part.meeting(),
    };
    let bytes = part.len * part.dtype.size_of();
    match call {
        Call::AllReduce(op) if bytes <= INLINE => part.all_reduce_short(input, *op),
        Call::AllReduce(op) => part.all_reduce_long(input, *op),
        Call::AllGather => {
            let ranges: Vec<_> = (0..part.size)
                .map(|i| i * part.len..(i + 1) * part.len)
                .collect();
            part.gather(Rc::new(input), &ranges)
        }
        Call::ReduceScatter(op) => part.reduce_scatter(input, *op),
        Call::Broadcast { root } if bytes <= SHORT_BROADCAST || part.size == 2 => {
            part.broadcast_short(input, *root)
        }
        Call::Broadcast { root } => part.broadcast_long(input, *root),
        Call::AllToAll { send, receive } => part.all_to_all(&Rc::new(input), send, receive),
        Call::Barrier => part.meeting(),
        Call::Send { .. } | Call::Receive { .. } => {
            unreachable!("{} is no collective", call.name())
        }
    }
}

/// One member's part in a collective.
#[derive(Clone)]
struct Part {
    dtype: DType,
    len: usize,
    own: usize,
    size: usize,
    pool: Arc<BufferPool>,
}

impl Part {
    /// A value for each member but this one.
    fn each<T>(&self, value: impl Fn(usize) -> Option<T>) -> Vec<Option<T>> {
        let others = |index| {
            if index == self.own {
                None
            } else {
                value(index)
            }
        };
        (0..self.size).map(others).collect()
    }

    /// The chunks of the elements, as equal as they can be: the first ones have one more.
    fn chunks(&self) -> Vec<Range<usize>> {
        let (least, more) = (self.len / self.size, self.len % self.size);
        let start = |index: usize| index * least + index.min(more);
        (0..self.size)
            .map(|index| start(index)..start(index + 1))
            .collect()
    }

    fn take(&self, len: usize) -> Lent {
        Lent::new(self.pool.take(self.dtype, len), &self.pool)
    }

    /// Everybody comes, nothing is exchanged.
    fn meeting(&self) -> Round {
        Round {
            gives: self.each(|_| None),
            takes: self.each(|_| None),
            then: Box::new(|| Outcome::Done(Buffer::empty(DType::U8))),
        }
    }

    /// Everybody gets the pieces of all. `ranges` are their places in the result; `piece` is the one of
    /// this rank.
    fn gather(&self, piece: Rc<Lent>, ranges: &[Range<usize>]) -> Round {
        let mut result = self.take(ranges[self.size - 1].end);
        put(&mut result, ranges[self.own].start, &piece, 0..piece.len());
        let (landing, takes) = self.open(result, ranges);
        Round {
            gives: self.each(|_| Outgoing::new(&piece, 0..piece.len())),
            takes,
            then: Box::new(|| Outcome::Done(keep(landing.close()))),
        }
    }

    /// The places of the others in a buffer.
    fn open(&self, buffer: Lent, ranges: &[Range<usize>]) -> (Landing, Vec<Option<Incoming>>) {
        let numbered = ranges.iter().enumerate();
        let others = numbered.map(|(index, range)| match index == self.own {
            true => range.start..range.start,
            false => range.clone(),
        });
        Landing::open(buffer, &others.collect::<Vec<_>>())
    }

    /// Everybody gets its own range from all, each in memory of its own, and reduces them.
    fn reduce(
        &self,
        input: Lent,
        ranges: &[Range<usize>],
        op: ReduceOp,
        then: impl FnOnce(Lent) -> Outcome + 'static,
    ) -> Round {
        let own = ranges[self.own].clone();
        let mut mine = self.take(own.len());
        put(&mut mine, 0, &input, own.clone());
        let mut mine = Some(mine);
        let input = Rc::new(input);
        let (mut landings, mut takes) = (Vec::new(), Vec::new());
        for index in 0..self.size {
            let (memory, place) = match mine.take_if(|_| index == self.own) {
                Some(mine) => (mine, 0..0),
                None => (self.take(own.len()), 0..own.len()),
            };
            let (landing, place) = Landing::at(memory, place);
            landings.push(landing);
            takes.push(place);
        }
        Round {
            gives: self.each(|index| Outgoing::new(&input, ranges[index].clone())),
            takes,
            then: Box::new(move || then(reduced(landings, op))),
        }
    }

    fn all_reduce_short(&self, input: Lent, op: ReduceOp) -> Round {
        let whole = vec![0..self.len; self.size];
        self.reduce(input, &whole, op, |sum| Outcome::Done(keep(sum)))
    }

    fn all_reduce_long(self, input: Lent, op: ReduceOp) -> Round {
        let chunks = self.chunks();
        let part = self.clone();
        self.reduce(input, &chunks.clone(), op, move |sum| {
            Outcome::Again(part.gather(Rc::new(sum), &chunks))
        })
    }

    fn reduce_scatter(&self, input: Lent, op: ReduceOp) -> Round {
        self.reduce(input, &self.chunks(), op, |sum| Outcome::Done(keep(sum)))
    }

    /// The root gives all to everybody.
    fn broadcast_short(&self, input: Lent, root: usize) -> Round {
        if self.own == root {
            let input = Rc::new(input);
            return Round {
                gives: self.each(|_| Outgoing::new(&input, 0..self.len)),
                takes: self.each(|_| None),
                then: Box::new(|| Outcome::Done(unshared(input))),
            };
        }
        let place = |index| if index == root { 0..self.len } else { 0..0 };
        // What this rank gives is not read, so its memory is that of the result.
        let (landing, takes) = Landing::open(input, &(0..self.size).map(place).collect::<Vec<_>>());
        Round {
            gives: self.each(|_| None),
            takes,
            then: Box::new(|| Outcome::Done(keep(landing.close()))),
        }
    }

    /// The root gives each its chunk, then all give their chunks to all but the root.
    fn broadcast_long(self, input: Lent, root: usize) -> Round {
        let chunks = self.chunks();
        if self.own == root {
            return self.scatter(Rc::new(input), &chunks);
        }
        let own = chunks[self.own].len();
        let place = |index| if index == root { 0..own } else { 0..0 };
        let places: Vec<_> = (0..self.size).map(place).collect();
        let (landing, takes) = Landing::open(self.take(own), &places);
        let gives = self.each(|_| None);
        let then = move || {
            let piece = Rc::new(landing.close());
            drop(input);
            let mut round = self.gather(piece, &chunks);
            round.gives[root] = None;
            Outcome::Again(round)
        };
        Round {
            gives,
            takes,
            then: Box::new(then),
        }
    }

    fn scatter(self, input: Rc<Lent>, chunks: &[Range<usize>]) -> Round {
        let own = chunks[self.own].clone();
        let gives = self.each(|index| Outgoing::new(&input, chunks[index].clone()));
        let takes = self.each(|_| None);
        let then = move || {
            let round = Round {
                gives: self.each(|_| Outgoing::new(&input, own.clone())),
                takes: self.each(|_| None),
                then: Box::new(|| Outcome::Done(unshared(input))),
            };
            Outcome::Again(round)
        };
        Round {
            gives,
            takes,
            then: Box::new(then),
        }
    }

    fn all_to_all(&self, input: &Rc<Lent>, send: &[usize], receive: &[usize]) -> Round {
        let (from, to) = (one_after_another(send), one_after_another(receive));
        let mut result = self.take(to[self.size - 1].end);
        put(
            &mut result,
            to[self.own].start,
            input,
            from[self.own].clone(),
        );
        let (landing, takes) = self.open(result, &to);
        Round {
            gives: self.each(|index| Outgoing::new(input, from[index].clone())),
            takes,
            then: Box::new(|| Outcome::Done(keep(landing.close()))),
        }
    }
}

/// The reduction of what has landed, in group order, in the memory of the first.
fn reduced(landings: Vec<Landing>, op: ReduceOp) -> Lent {
    let mut contributions = landings.into_iter().map(Landing::close);
    let mut first = contributions.next().expect("a group has members");
    let rest: Vec<Lent> = contributions.collect();
    reduce_into(
        &mut first,
        &rest.iter().map(|lent| &**lent).collect::<Vec<_>>(),
        op,
    );
    first
}

/// The ranges of so many elements each.
fn one_after_another(counts: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let range = |count: &usize| {
        end += count;
        end - count..end
    };
    counts.iter().map(range).collect()
}

fn put(whole: &mut Buffer, at: usize, source: &Buffer, range: Range<usize>) {
    let written = whole.write(at, source, range);
    written.expect("memory is taken with the type of the call");
}

/// The buffer that went out, once all of it is gone.
fn unshared(input: Rc<Lent>) -> Buffer {
    keep(Rc::into_inner(input).expect("what went out is no longer held"))
}
