//! A collective that all members have come to, and what each of them gets from it.

use std::mem;
use std::sync::{Arc, Mutex, OnceLock};

use super::meeting::{Meeting, Slot};
use super::state::{WorldState, lock};
use crate::comm::buffer::{Buffer, DType};
use crate::comm::call::{Call, Operation, ReduceOp, Signature};
use crate::comm::reduce::{reduce_all, reduce_range};

/// One member's part in a collective.
#[derive(Debug)]
pub(super) struct Arrival {
    pub signature: Arc<Signature>,
    pub input: Buffer,
}

#[derive(Debug)]
pub(super) enum Gathered {
    /// Each member makes its own result from what all gave.
    Inputs(Vec<Arrival>),
    /// All get the same value: the first who fetches it computes it, and the inputs are freed.
    Reduction {
        op: ReduceOp,
        inputs: Mutex<Vec<Buffer>>,
        value: OnceLock<Buffer>,
    },
    /// The parts of a split.
    Parts(Vec<Arc<Meeting>>),
}

impl Gathered {
    /// From the arrivals in group order, which agree with each other. Cheap: it runs under a lock.
    pub fn new(arrivals: Vec<Arrival>, world: &Arc<WorldState>) -> Self {
        let signature = Arc::clone(&arrivals[0].signature);
        match &signature.operation {
            Operation::Split { name, groups } => {
                let meeting = |ranks: &Vec<usize>| Meeting::new(name, ranks.clone(), world);
                Gathered::Parts(groups.iter().map(meeting).collect())
            }
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
pub(super) fn result(slot: Arc<Slot>, index: usize, signature: &Signature) -> Buffer {
    match slot.gathered.get() {
        Some(Gathered::Inputs(arrivals)) => from_inputs(arrivals, index, signature),
        Some(Gathered::Reduction { op, inputs, value }) => {
            value.get_or_init(|| reduce_all(mem::take(&mut *lock(inputs)), *op));
            take_value(slot)
        }
        Some(Gathered::Parts(_)) | None => unreachable!("all have come to a call, not to a split"),
    }
}

/// The common value: moved out by the last handle, copied by the others.
fn take_value(slot: Arc<Slot>) -> Buffer {
    let copy = |slot: &Slot| match slot.gathered.get() {
        Some(Gathered::Reduction { value, .. }) => value.get().cloned(),
        _ => None,
    };
    let value = match Arc::try_unwrap(slot) {
        Err(shared) => copy(&shared),
        Ok(last) => match last.gathered.into_inner() {
            Some(Gathered::Reduction { value, .. }) => value.into_inner(),
            _ => None,
        },
    };
    value.expect("the value was computed before it is taken")
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

fn from_inputs(arrivals: &[Arrival], index: usize, signature: &Signature) -> Buffer {
    let Operation::Call(call) = &signature.operation else {
        unreachable!("a split has no inputs")
    };
    match call {
        Call::AllGather => {
            let inputs = arrivals.iter().map(|arrival| (&arrival.input, 0));
            assemble(
                signature.dtype,
                inputs.map(|(input, start)| (input, start, input.len())),
            )
        }
        Call::ReduceScatter(op) => {
            let inputs: Vec<&Buffer> = arrivals.iter().map(|arrival| &arrival.input).collect();
            let chunk = signature.len / inputs.len();
            reduce_range(&inputs, index * chunk..(index + 1) * chunk, *op)
        }
        Call::Broadcast { root } => arrivals[*root].input.clone(),
        Call::AllToAll { receive, .. } => {
            let parts = arrivals.iter().zip(receive);
            let start = |arrival: &Arrival| sent_before(&arrival.signature, index);
            assemble(
                signature.dtype,
                parts.map(|(arrival, count)| (&arrival.input, start(arrival), *count)),
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
    dtype: DType,
    pieces: impl Iterator<Item = (&'a Buffer, usize, usize)> + Clone,
) -> Buffer {
    let len = pieces.clone().map(|(_, _, count)| count).sum();
    let mut whole = Buffer::with_capacity(dtype, len);
    for (source, start, count) in pieces {
        whole
            .extend(source, start..start + count)
            .expect("the types were compared when the contributions arrived");
    }
    whole
}
