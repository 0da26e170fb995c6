//! A collective that all members have come to, and what each of them gets from it.

use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use super::Visit;
use super::meeting::{Meeting, Slot};
use super::state::{WorldState, lock};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, ReduceOp, Signature};
use crate::pool::Lent;
use crate::reduce::{reduce_into, reduce_range};

/// One member's part in a collective.
#[derive(Debug)]
pub(super) struct Arrival {
    pub signature: Arc<Signature>,
    /// Goes home when the last member has fetched its result.
    pub input: Lent,
}

#[derive(Debug)]
pub(super) enum Gathered {
    /// Each member makes its own result from what all gave.
    Inputs(Vec<Arrival>),
    /// All get the same value: the first who fetches it computes it in the memory of the first input,
    /// and the other inputs go home.
    Reduction {
        op: ReduceOp,
        inputs: Mutex<Vec<Lent>>,
        value: OnceLock<Lent>,
    },
    /// The same for many elements: the members share the work. Each begins with the part of its own
    /// number, and takes the others as it finds them, computed or not.
    Shared {
        op: ReduceOp,
        inputs: Vec<Arrival>,
        parts: Vec<OnceLock<Lent>>,
    },
    /// The parts of a split.
    Parts(Vec<Arc<Meeting>>),
}

/// Elements from which on a reduction is worth sharing.
const SHARED: usize = 1 << 14;

impl Gathered {
    /// From the arrivals in group order, which agree with each other. Cheap: it runs under a lock.
    pub fn new(arrivals: Vec<Arrival>, world: &Arc<WorldState>) -> Self {
        let signature = Arc::clone(&arrivals[0].signature);
        match &signature.operation {
            Operation::Split { name, groups } => {
                let meeting = |ranks: &Vec<usize>| Meeting::new(name, ranks.clone(), world);
                Gathered::Parts(groups.iter().map(meeting).collect())
            }
            Operation::Call(Call::AllReduce(op)) if signature.len >= SHARED => Gathered::Shared {
                op: *op,
                parts: arrivals.iter().map(|_| OnceLock::new()).collect(),
                inputs: arrivals,
            },
            Operation::Call(Call::AllReduce(op)) => {
                let inputs = arrivals.into_iter().map(|arrival| arrival.input).collect();
                let inputs = Mutex::new(inputs);
                Gathered::Reduction {
                    op: *op,
                    inputs,
                    value: OnceLock::new(),
                }
            }
            Operation::Call(_) => Gathered::Inputs(arrivals),
        }
    }
}

/// The result of a member, once all have come. Takes no lock of the group.
pub(super) fn result(slot: Arc<Slot>, visit: &Visit) -> Buffer {
    match slot.gathered.get() {
        Some(Gathered::Inputs(arrivals)) => from_inputs(arrivals, visit),
        Some(Gathered::Reduction { op, inputs, value }) => {
            value.get_or_init(|| reduced(mem::take(&mut *lock(inputs)), *op));
            take_value(slot, visit)
        }
        Some(Gathered::Shared { op, inputs, parts }) => shared(*op, inputs, parts, visit),
        Some(Gathered::Parts(_)) | None => unreachable!("all have come to a call, not to a split"),
    }
}

/// Computes the parts that nobody has computed yet, and puts all of them together.
fn shared(op: ReduceOp, inputs: &[Arrival], parts: &[OnceLock<Lent>], visit: &Visit) -> Buffer {
    let Signature { dtype, len, .. } = *visit.signature;
    let size = len.div_ceil(parts.len());
    let range = |part: usize| (part * size).min(len)..((part + 1) * size).min(len);
    let inputs: Vec<&Buffer> = inputs.iter().map(|arrival| &*arrival.input).collect();
    let mut whole = visit.pool().take(dtype, len);
    for step in 0..parts.len() {
        let part = (visit.group.index() + step) % parts.len();
        let range = range(part);
        let reduced = parts[part].get_or_init(|| {
            let mut result = visit.pool().take(dtype, range.len());
            reduce_range(&inputs, range.clone(), op, &mut result);
            Lent::new(result, visit.pool())
        });
        put(&mut whole, range.start, reduced, 0..range.len());
    }
    whole
}

fn reduced(mut inputs: Vec<Lent>, op: ReduceOp) -> Lent {
    let rest = inputs.split_off(1);
    let mut first = inputs.remove(0);
    let rest: Vec<&Buffer> = rest.iter().map(|input| &**input).collect();
    reduce_into(&mut first, &rest, op);
    first
}

/// The common value: copied for each handle but the last, which gives memory of its own for it. So each
/// member takes one buffer from its pool, whoever comes last.
fn take_value(slot: Arc<Slot>, visit: &Visit) -> Buffer {
    let Signature { dtype, len, .. } = *visit.signature;
    let mut own = visit.pool().take(dtype, len);
    let missing = "the value was computed before it is taken";
    match Arc::try_unwrap(slot).map(|last| last.gathered.into_inner()) {
        Err(shared) => match shared.gathered.get() {
            Some(Gathered::Reduction { value, .. }) => {
                put(&mut own, 0, value.get().expect(missing), 0..len);
            }
            _ => unreachable!("{missing}"),
        },
        Ok(Some(Gathered::Reduction { value, .. })) => {
            mem::swap(&mut own, &mut value.into_inner().expect(missing));
        }
        Ok(_) => unreachable!("{missing}"),
    }
    own
}

/// The part of a split that contains a rank, and its index there.
pub(super) fn part(slot: &Slot, rank: usize) -> (&Arc<Meeting>, usize) {
    let Some(Gathered::Parts(parts)) = slot.gathered.get() else {
        unreachable!("all have come to a split")
    };
    let place = |part: &Arc<Meeting>| part.ranks().iter().position(|member| *member == rank);
    let mut found = parts.iter().filter_map(|part| Some((part, place(part)?)));
    found
        .next()
        .expect("the parts were checked to contain every rank")
}

fn from_inputs(arrivals: &[Arrival], visit: &Visit) -> Buffer {
    let Operation::Call(call) = &visit.signature.operation else {
        unreachable!("a split has no inputs")
    };
    let (index, pool) = (visit.group.index(), visit.pool());
    let Signature { dtype, len, .. } = *visit.signature;
    let inputs = arrivals.iter().map(|arrival| &*arrival.input);
    match call {
        Call::AllGather => assemble(
            pool.take(dtype, len * arrivals.len()),
            inputs.map(|input| (input, 0, len)),
        ),
        Call::ReduceScatter(op) => {
            let chunk = len / arrivals.len();
            let mut result = pool.take(dtype, chunk);
            let inputs: Vec<&Buffer> = inputs.collect();
            reduce_range(
                &inputs,
                index * chunk..(index + 1) * chunk,
                *op,
                &mut result,
            );
            result
        }
        Call::Broadcast { root } => {
            let root = &*arrivals[*root].input;
            assemble(pool.take(dtype, len), [(root, 0, len)].into_iter())
        }
        Call::AllToAll { receive, .. } => {
            let starts = arrivals.iter().map(|a| sent_before(&a.signature, index));
            let pieces = inputs.zip(starts).zip(receive);
            assemble(
                pool.take(dtype, receive.iter().sum()),
                pieces.map(|((input, start), count)| (input, start, *count)),
            )
        }
        Call::Barrier => Buffer::empty(DType::U8),
        Call::AllReduce(_) | Call::Send { .. } | Call::Receive { .. } => {
            unreachable!("{} is not made from inputs", call.name())
        }
    }
}

/// The elements that a member of an all_to_all sends to those before `index`.
fn sent_before(signature: &Signature, index: usize) -> usize {
    match &signature.operation {
        Operation::Call(Call::AllToAll { send, .. }) => send[..index].iter().sum(),
        _ => 0,
    }
}

/// Puts pieces, each `(source, start, count)`, one after the other.
fn assemble<'a>(
    mut whole: Buffer,
    pieces: impl Iterator<Item = (&'a Buffer, usize, usize)>,
) -> Buffer {
    let mut at = 0;
    for (source, start, count) in pieces {
        put(&mut whole, at, source, start..start + count);
        at += count;
    }
    whole
}

fn put(whole: &mut Buffer, at: usize, source: &Buffer, range: Range<usize>) {
    let written = whole.write(at, source, range);
    written.expect("the types were compared when the contributions arrived");
}
