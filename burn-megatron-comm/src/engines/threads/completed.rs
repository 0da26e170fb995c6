//! A collective that all members have joined, and the computation of the result of each member.

use std::mem;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::group_state::{CollectiveOutcome, GroupState};
use super::state::WorldState;
use crate::buffer::{Buffer, DType};
use crate::call::{Call, Operation, ReduceOp, Signature};
use crate::engines::reduce::{reduce_into, reduce_range};
use crate::pool::{BufferPool, PooledBuffer};
use crate::report::recorded_call::RecordedCall;

/// The input of one member to a collective.
#[derive(Debug)]
pub(super) struct Contribution {
    pub signature: Arc<Signature>,
    /// The input of the member. It returns to its pool when the last member has taken its result.
    pub input: PooledBuffer,
}

/// The inputs of all members, and the method that computes the results.
#[derive(Debug)]
pub(super) enum CompletedCollective {
    /// Each member computes its own result from the inputs of all members.
    Inputs(Vec<Contribution>),
    /// All members have the same result. The first member that takes the result computes it in the memory of the first
    /// input. The other inputs return to their pools.
    Reduction {
        op: ReduceOp,
        inputs: Mutex<Vec<PooledBuffer>>,
        value: OnceLock<PooledBuffer>,
    },
    /// A reduction of many elements, which the members compute together. Each member first computes the part with its
    /// own index, and then the parts that no member has computed yet.
    SharedReduction {
        op: ReduceOp,
        inputs: Vec<Contribution>,
        parts: Vec<OnceLock<PooledBuffer>>,
    },
    /// The groups that a split has created.
    Split(Vec<Arc<GroupState>>),
}

/// The minimum number of elements of a [`CompletedCollective::SharedReduction`].
const MIN_SHARED: usize = 1 << 14;

impl CompletedCollective {
    /// Creates the completed collective from the inputs in group order. The calls must match. This function runs under
    /// a lock, so it must be fast.
    pub fn new(contributions: Vec<Contribution>, world: &Arc<WorldState>) -> Self {
        let signature = Arc::clone(&contributions[0].signature);
        match &signature.operation {
            Operation::Split { name, groups } => {
                let group = |ranks: &Vec<usize>| GroupState::new(name, ranks.clone(), world);
                CompletedCollective::Split(groups.iter().map(group).collect())
            }
            Operation::Call(Call::AllReduce(op)) if signature.len >= MIN_SHARED => {
                CompletedCollective::SharedReduction {
                    op: *op,
                    parts: contributions.iter().map(|_| OnceLock::new()).collect(),
                    inputs: contributions,
                }
            }
            Operation::Call(Call::AllReduce(op)) => {
                let inputs = contributions
                    .into_iter()
                    .map(|contribution| contribution.input)
                    .collect();
                let inputs = Mutex::new(inputs);
                CompletedCollective::Reduction {
                    op: *op,
                    inputs,
                    value: OnceLock::new(),
                }
            }
            Operation::Call(_) => CompletedCollective::Inputs(contributions),
        }
    }
}

/// Returns the result of a member after all members have joined. Does not lock the group.
pub(super) fn result(
    outcome: Arc<CollectiveOutcome>,
    call: &RecordedCall,
    pool: &Arc<BufferPool>,
) -> Buffer {
    match outcome.completed.get() {
        Some(CompletedCollective::Inputs(contributions)) => from_inputs(contributions, call, pool),
        Some(CompletedCollective::Reduction { op, inputs, value }) => {
            value.get_or_init(|| reduced(mem::take(&mut *inputs.lock()), *op));
            take_value(outcome, call, pool)
        }
        Some(CompletedCollective::SharedReduction { op, inputs, parts }) => {
            share_reduction(*op, inputs, parts, call, pool)
        }
        Some(CompletedCollective::Split(_)) | None => {
            unreachable!("the collective is complete and not a split")
        }
    }
}

/// Computes the parts of a reduction that no member has computed yet, and concatenates all parts.
fn share_reduction(
    op: ReduceOp,
    inputs: &[Contribution],
    parts: &[OnceLock<PooledBuffer>],
    call: &RecordedCall,
    pool: &Arc<BufferPool>,
) -> Buffer {
    let Signature { dtype, len, .. } = *call.signature;
    let size = len.div_ceil(parts.len());
    let range = |part: usize| (part * size).min(len)..((part + 1) * size).min(len);
    let inputs: Vec<&Buffer> = inputs
        .iter()
        .map(|contribution| &*contribution.input)
        .collect();
    let mut result = pool.take(dtype, len);
    for step in 0..parts.len() {
        let part = (call.group.index() + step) % parts.len();
        let range = range(part);
        let reduced = parts[part].get_or_init(|| {
            let mut reduced = pool.take(dtype, range.len());
            reduce_range(&inputs, range.clone(), op, &mut reduced);
            PooledBuffer::new(reduced, pool)
        });
        result.copy_from(range.start, reduced, 0..range.len());
    }
    result
}

fn reduced(mut inputs: Vec<PooledBuffer>, op: ReduceOp) -> PooledBuffer {
    let rest = inputs.split_off(1);
    let mut first = inputs.remove(0);
    let rest: Vec<&Buffer> = rest.iter().map(|input| &**input).collect();
    reduce_into(&mut first, &rest, op);
    first
}

/// Returns the result that is common to all members. Each member that is not the last gets a copy in a buffer from its
/// own pool. The last member gets the original and puts a buffer from its own pool in its place. In this way, each
/// member takes one buffer from its pool, regardless of the order.
fn take_value(outcome: Arc<CollectiveOutcome>, call: &RecordedCall, pool: &BufferPool) -> Buffer {
    let Signature { dtype, len, .. } = *call.signature;
    let mut own = pool.take(dtype, len);
    let missing = "the value was computed before it is taken";
    match Arc::try_unwrap(outcome).map(|last| last.completed.into_inner()) {
        Err(shared) => match shared.completed.get() {
            Some(CompletedCollective::Reduction { value, .. }) => {
                own.copy_from(0, value.get().expect(missing), 0..len);
            }
            _ => unreachable!("{missing}"),
        },
        Ok(Some(CompletedCollective::Reduction { value, .. })) => {
            mem::swap(&mut own, &mut value.into_inner().expect(missing));
        }
        Ok(_) => unreachable!("{missing}"),
    }
    own
}

/// Returns the group of a split that contains `rank`, and the index of the rank in this group.
pub(super) fn part(outcome: &CollectiveOutcome, rank: usize) -> (&Arc<GroupState>, usize) {
    let Some(CompletedCollective::Split(parts)) = outcome.completed.get() else {
        unreachable!("the collective is a complete split")
    };
    let index = |part: &Arc<GroupState>| part.ranks().iter().position(|member| *member == rank);
    let mut found = parts.iter().filter_map(|part| Some((part, index(part)?)));
    found
        .next()
        .expect("the parts were checked to contain every rank")
}

fn from_inputs(
    contributions: &[Contribution],
    recorded: &RecordedCall,
    pool: &BufferPool,
) -> Buffer {
    let Operation::Call(call) = &recorded.signature.operation else {
        unreachable!("a split has no inputs")
    };
    let index = recorded.group.index();
    let Signature { dtype, len, .. } = *recorded.signature;
    let inputs = contributions
        .iter()
        .map(|contribution| &*contribution.input);
    match call {
        Call::AllGather => assemble(
            pool.take(dtype, len * contributions.len()),
            inputs.map(|input| (input, 0, len)),
        ),
        Call::ReduceScatter(op) => {
            let chunk = len / contributions.len();
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
            let root = &*contributions[*root].input;
            assemble(pool.take(dtype, len), [(root, 0, len)].into_iter())
        }
        Call::AllToAll { receive, .. } => {
            let starts = contributions
                .iter()
                .map(|a| sent_before(&a.signature, index));
            let chunks = inputs.zip(starts).zip(receive);
            assemble(
                pool.take(dtype, receive.iter().sum()),
                chunks.map(|((input, start), count)| (input, start, *count)),
            )
        }
        Call::Barrier => Buffer::empty(DType::U8),
        Call::AllReduce(_) | Call::Send { .. } | Call::Receive { .. } => {
            unreachable!("{} has no separate result per member", call.name())
        }
    }
}

/// Returns the number of elements that a member of an all_to_all sends to the members before `index`.
fn sent_before(signature: &Signature, index: usize) -> usize {
    match &signature.operation {
        Operation::Call(Call::AllToAll { send, .. }) => send[..index].iter().sum(),
        _ => 0,
    }
}

/// Concatenates chunks into `result`. Each chunk is given as `(source, start, count)`.
fn assemble<'a>(
    mut result: Buffer,
    chunks: impl Iterator<Item = (&'a Buffer, usize, usize)>,
) -> Buffer {
    let mut at = 0;
    for (source, start, count) in chunks {
        result.copy_from(at, source, start..start + count);
        at += count;
    }
    result
}
