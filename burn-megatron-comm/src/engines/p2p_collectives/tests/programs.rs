//! Random programs of calls on several groups, whose results are compared with a serial model.

use std::sync::Arc;

use half::bf16;

use crate::engines::reduce::reduce_range;
use crate::{Buffer, Call, CommError, Communicator, DType, Pending, ReduceOp};

/// A random number generator that returns the same numbers on every rank.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((self.0 >> 33) % bound as u64) as usize
    }
}

/// Returns elements that differ by rank, call and position. The sums of these elements depend on the order of the
/// additions.
pub fn contribution(dtype: DType, len: usize, rank: usize, call: usize) -> Buffer {
    let value = |i: usize| {
        let mut random = Random((rank * 7919 + call * 104_729 + i * 31 + 1) as u64);
        (random.below(1 << 20) as f64 - 500_000.0) / 1024.0
    };
    let values = (0..len).map(value);
    match dtype {
        DType::F64 => values.map(|v| v / 3.0).collect::<Vec<_>>().into(),
        DType::F32 => values.map(|v| (v / 3.0) as f32).collect::<Vec<_>>().into(),
        DType::BF16 => values.map(bf16::from_f64).collect::<Vec<_>>().into(),
        DType::F16 => values.map(half::f16::from_f64).collect::<Vec<_>>().into(),
        DType::I64 => values
            .map(|v| (v * 1024.0) as i64)
            .collect::<Vec<_>>()
            .into(),
        DType::I32 => values
            .map(|v| (v * 1024.0) as i32)
            .collect::<Vec<_>>()
            .into(),
        DType::U8 => values
            .map(|v| (v * 1024.0) as i64 as u8)
            .collect::<Vec<_>>()
            .into(),
    }
}

/// Returns the expected result of a call on the member with index `index`, given the inputs of all members.
pub fn expected(call: &Call, index: usize, inputs: &[Buffer]) -> Buffer {
    let (dtype, len) = (inputs[index].dtype(), inputs[index].len());
    let all: Vec<&Buffer> = inputs.iter().collect();
    let reduced = |range: std::ops::Range<usize>, op| {
        let mut result = Buffer::zeros(dtype, range.len());
        reduce_range(&all, range, op, &mut result);
        result
    };
    match call {
        Call::AllReduce(op) => reduced(0..len, *op),
        Call::ReduceScatter(op) => {
            let chunk = len / inputs.len();
            reduced(index * chunk..(index + 1) * chunk, *op)
        }
        Call::AllGather => Buffer::concat(inputs).unwrap(),
        Call::Broadcast { root } => inputs[*root].clone(),
        Call::Barrier => Buffer::empty(DType::U8),
        other => unreachable!("{} is made elsewhere", other.name()),
    }
}

/// One call of a program. It is the same on all ranks.
struct ProgramStep {
    group: usize,
    call: Call,
    dtype: DType,
    len: usize,
}

fn step(random: &mut Random, groups: usize, size: usize, longest: usize) -> ProgramStep {
    let dtype = DType::ALL[random.below(7)];
    let op = match random.below(4) {
        0 => ReduceOp::Max,
        1 => ReduceOp::Min,
        2 if dtype.is_float() => ReduceOp::Average,
        _ => ReduceOp::Sum,
    };
    let len = match random.below(4) {
        0 => random.below(4),
        1 | 2 => random.below(2000),
        _ => random.below(longest),
    };
    let group = random.below(groups);
    let (call, len) = match random.below(6) {
        0 => (Call::AllReduce(op), len),
        1 => (Call::AllGather, len),
        2 => (Call::ReduceScatter(op), len * size),
        3 => (Call::Broadcast { root: usize::MAX }, len),
        4 => (Call::Barrier, 0),
        _ => (
            Call::AllToAll {
                send: Vec::new(),
                receive: Vec::new(),
            },
            len,
        ),
    };
    ProgramStep {
        group,
        call,
        dtype,
        len,
    }
}

/// A call that this rank has started, and its expected result.
struct Started {
    pending: Pending,
    wanted: Buffer,
    what: String,
}

/// Starts the step with number `number` on the group `comm`.
fn start(
    comm: &Arc<dyn Communicator>,
    step: &ProgramStep,
    number: usize,
) -> Result<Started, CommError> {
    let (own, size, ranks) = (comm.rank(), comm.size(), comm.group().ranks().to_vec());
    let count = |from: usize, to: usize| (from * 5 + to * 3 + number) % 4 * step.len / size;
    let (call, inputs): (Call, Vec<Buffer>) = match &step.call {
        Call::AllToAll { .. } => {
            let total = |i: usize| (0..size).map(|j| count(i, j)).sum();
            let call = Call::AllToAll {
                send: (0..size).map(|to| count(own, to)).collect(),
                receive: (0..size).map(|from| count(from, own)).collect(),
            };
            let input = |i: usize| contribution(step.dtype, total(i), ranks[i], number);
            (call, (0..size).map(input).collect())
        }
        Call::Barrier => (Call::Barrier, vec![Buffer::empty(DType::U8); size]),
        call => {
            let call = match call {
                Call::Broadcast { .. } => Call::Broadcast {
                    root: number % size,
                },
                // The chunks of the largest group fit into the chunks of a smaller group.
                call => call.clone(),
            };
            let len = match call {
                Call::ReduceScatter(_) => step.len / size * size,
                _ => step.len,
            };
            let input = |rank: &usize| contribution(step.dtype, len, *rank, number);
            (call, ranks.iter().map(input).collect())
        }
    };
    let wanted = match &call {
        Call::AllToAll { .. } => {
            let piece = |i: usize| {
                let start = (0..own).map(|to| count(i, to)).sum();
                inputs[i].slice(start..start + count(i, own))
            };
            Buffer::concat(&(0..size).map(piece).collect::<Vec<_>>()).unwrap()
        }
        call => expected(call, own, &inputs),
    };
    let what = format!(
        "step {number}, {call:?} of {} over {}",
        step.dtype,
        comm.group()
    );
    let input = inputs[own].clone();
    let pending = comm.start(call, input)?;
    Ok(Started {
        pending,
        wanted,
        what,
    })
}

/// Runs a random program of `steps` calls with up to `longest` elements. The calls use the whole world, its halves, and
/// its even and odd ranks. Each rank waits for the calls in a different order.
pub fn run(
    world: &Arc<dyn Communicator>,
    seed: u64,
    steps: usize,
    longest: usize,
) -> Result<(), CommError> {
    let (own, size) = (world.rank(), world.size());
    let halves = vec![(0..size / 2).collect(), (size / 2..size).rev().collect()];
    let mut groups = vec![Arc::clone(world)];
    if size > 2 {
        groups.push(world.split("half", &halves)?);
        let alternate = |odd: usize| (0..size).filter(|rank| rank % 2 == odd).collect();
        groups.push(world.split("alternate", &[alternate(0), alternate(1)])?);
    }
    let mut random = Random(seed);
    let mut private = Random(seed ^ (own as u64 + 1));
    let mut started = Vec::new();
    for number in 0..steps {
        let step = step(&mut random, groups.len(), size, longest);
        let comm = &groups[step.group];
        if comm.size() > 1 {
            started.push(start(comm, &step, number)?);
        }
        while started.len() > private.below(6) {
            let Started {
                pending,
                wanted,
                what,
            } = started.swap_remove(private.below(started.len()));
            if private.below(8) > 0 {
                assert_eq!(pending.wait()?, wanted, "rank {own}, {what}");
            }
        }
    }
    for left in started {
        assert_eq!(
            left.pending.wait()?,
            left.wanted,
            "rank {own}, {}",
            left.what
        );
    }
    Ok(())
}
