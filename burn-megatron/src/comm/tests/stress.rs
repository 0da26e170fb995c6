//! Random programs of collectives and messages over several groups, against the reference.

use proptest::prelude::*;
use std::thread;
use std::time::Duration;

use super::*;

const RANKS: usize = 6;

/// The groups of each kind, as world ranks in group order.
fn groups(kind: usize) -> Vec<Vec<usize>> {
    match kind {
        0 => vec![(0..RANKS).collect()],
        1 => vec![vec![0, 1], vec![2, 3], vec![4, 5]],
        2 => vec![vec![4, 2, 0], vec![1, 3, 5]],
        _ => vec![vec![0], vec![5, 1, 2, 4], vec![3]],
    }
}

/// One collective that all ranks make in their group of a kind, or a message round the ring of it.
#[derive(Clone, Debug)]
struct Step {
    kind: usize,
    operation: usize,
    op: ReduceOp,
    dtype: DType,
    len: usize,
    seed: usize,
    /// How many steps later each rank fetches the result; another number on each rank.
    delays: Vec<usize>,
    pauses: Vec<u8>,
}

fn step() -> impl Strategy<Value = Step> {
    let ops = prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]);
    let dtypes = prop::sample::select(DTYPES.to_vec());
    let delays = prop::collection::vec(0usize..6, RANKS);
    let pauses = prop::collection::vec(any::<u8>(), RANKS);
    (
        0usize..4,
        0usize..6,
        ops,
        dtypes,
        0usize..5,
        0usize..100,
        delays,
        pauses,
    )
        .prop_map(
            |(kind, operation, op, dtype, len, seed, delays, pauses)| Step {
                kind,
                operation,
                op,
                dtype,
                len,
                seed,
                delays,
                pauses,
            },
        )
}

impl Step {
    fn members(&self, rank: usize) -> Vec<usize> {
        groups(self.kind)
            .into_iter()
            .find(|group| group.contains(&rank))
            .unwrap()
    }

    fn call(&self, size: usize) -> Call {
        match self.operation {
            0 => Call::AllReduce(self.op),
            1 => Call::AllGather,
            2 => Call::ReduceScatter(self.op),
            3 => Call::Broadcast {
                root: self.seed % size,
            },
            4 => Call::Barrier,
            _ => unreachable!("a message is made by hand"),
        }
    }

    fn input(&self, rank: usize, size: usize) -> Vec<i64> {
        let len = match self.operation {
            2 => self.len * size,
            4 => 0,
            _ => self.len,
        };
        (0..len)
            .map(|i| ((self.seed + 7 * rank + 3 * i) % 20) as i64)
            .collect()
    }

    /// Starts this step; what is to come out of it, and the handle.
    fn start(&self, comm: &dyn Communicator, rank: usize) -> Result<(Pending, Buffer), CommError> {
        let members = self.members(rank);
        let (size, index) = (members.len(), comm.rank());
        let inputs: Vec<Vec<i64>> = members.iter().map(|m| self.input(*m, size)).collect();
        let own = buffer(self.dtype, &inputs[index]);
        if self.operation == 5 {
            let from = (index + size - 1) % size;
            comm.send(own, (index + 1) % size)?;
            let wanted = buffer(self.dtype, &inputs[from]);
            return Ok((comm.start_receive(from, self.dtype, wanted.len())?, wanted));
        }
        let call = self.call(size);
        let dtype = if call == Call::Barrier {
            DType::U8
        } else {
            self.dtype
        };
        Ok((
            comm.start(call.clone(), own)?,
            buffer(dtype, &expected(&call, index, &inputs)),
        ))
    }
}

fn run(program: &[Step]) -> Result<Vec<()>, WorldError> {
    World::threads(RANKS)?
        .compute_threads(1)
        .deadline(Duration::from_secs(10))
        .run(|rank| {
            let (own, world) = (rank.rank(), rank.communicator());
            let mut comms = Vec::new();
            for kind in 0..4 {
                comms.push(world.split("part", &groups(kind))?);
            }
            let mut flying: Vec<(usize, Pending, Buffer)> = Vec::new();
            for (now, step) in program.iter().enumerate() {
                if step.pauses[own] > 230 {
                    thread::sleep(Duration::from_micros(step.pauses[own].into()));
                }
                let (handle, wanted) = step.start(&*comms[step.kind], own)?;
                flying.push((now + step.delays[own], handle, wanted));
                // The newest first: not the order in which they were started.
                let due: Vec<_> = flying.extract_if(.., |(due, ..)| *due <= now).collect();
                for (_, handle, wanted) in due.into_iter().rev() {
                    assert_eq!(handle.wait()?, wanted, "step {now} {step:?}");
                }
            }
            for (_, handle, wanted) in flying.into_iter().rev() {
                assert_eq!(handle.wait()?, wanted);
            }
            world.barrier()
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]

    #[test]
    fn random_programs_agree_with_the_reference(program in prop::collection::vec(step(), 1..60)) {
        let result = run(&program);
        prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    }
}
