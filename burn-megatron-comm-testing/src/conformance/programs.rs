//! Random programs of collectives and messages over several groups, whose results are compared with the reference.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use burn_megatron_kernels::philox::Stream;

use super::groups::partitions;
use super::model::MemberCall;
use super::operations::exchange;
use super::suite::{CaseContext, CheckResult, StartedCall};
use super::values::TestData;
use super::{ConformanceError, ConformanceOptions};
use burn_megatron_comm::{Buffer, Call, Communicator, DType, ReduceOp};

/// The random number generator of one program, which returns the same numbers on every rank.
struct ProgramRng {
    stream: Stream,
    next: u64,
}

impl ProgramRng {
    fn new(seed: u64, program: usize) -> Self {
        // The stream uses the high half of the position. The numbers of the calls use the low half.
        let stream = Stream::new(seed, (program as u64) << 32 | 1 << 31);
        Self { stream, next: 0 }
    }

    /// Returns a random number less than `count`.
    fn below(&mut self, count: usize) -> usize {
        let mut drawn = 0;
        self.stream.words(self.next, 1, |_, word| drawn = word);
        self.next += 1;
        ((u64::from(drawn) * count as u64) >> 32) as usize
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// One step of a program. Each rank issues a call on the part of the split `group` that contains the rank.
#[derive(Clone, Copy, Debug)]
struct ProgramStep {
    group: usize,
    operation: usize,
    op: ReduceOp,
    dtype: DType,
    len: usize,
    root: usize,
    data: TestData,
}

/// The number of kinds of steps.
const OPERATIONS: usize = 8;

impl ProgramStep {
    fn draw(rng: &mut ProgramRng, groups: usize, suite: &CaseContext<'_>) -> Self {
        let dtype = rng.of(&suite.options.dtypes);
        let mut ops = vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
        if dtype.is_float() {
            ops.push(ReduceOp::Average);
        }
        let seed = (rng.below(1 << 31) as u64) << 31 | rng.below(1 << 31) as u64;
        Self {
            group: rng.below(groups),
            operation: rng.below(OPERATIONS),
            op: rng.of(&ops),
            dtype,
            len: rng.of(&[0, 1, 2, 3, 5, 17, 300]),
            root: rng.below(suite.world.size()),
            data: suite.data_of(seed),
        }
    }

    fn part(&self, comm: &dyn Communicator, index: usize, operation: usize) -> MemberCall {
        let (ranks, size) = (comm.group().ranks(), comm.size());
        let input = |len: usize| self.data.whole(self.dtype, ranks[index], len);
        let count = |from: usize, to: usize| (self.root + 3 * from + 5 * to) % (self.len + 1);
        match operation {
            0 => (Call::AllReduce(self.op), input(self.len)),
            1 => (Call::AllGather, input(self.len)),
            2 => (Call::ReduceScatter(self.op), input(self.len * size)),
            3 => {
                let root = self.root % size;
                (Call::Broadcast { root }, input(self.len))
            }
            4 => exchange(self.data, self.dtype, ranks, index, count),
            _ => (Call::Barrier, Buffer::empty(DType::U8)),
        }
    }

    /// Starts the step on this rank.
    fn start(
        &self,
        suite: &mut CaseContext<'_>,
        comm: &dyn Communicator,
    ) -> Result<Vec<StartedCall>, ConformanceError> {
        match self.operation {
            6 => self.start_messages(suite, comm),
            7 => {
                let part = |operation: usize| move |index: usize| self.part(comm, index, operation);
                let (first, second) = (part(self.root % 6), part((self.root + 1) % 6));
                suite.start_all(comm, &[&first, &second])
            }
            operation => {
                let started = suite.start(comm, |index| self.part(comm, index, operation))?;
                Ok(vec![started])
            }
        }
    }

    /// Sends a message to the rank `root` positions after this rank, and receives a message from the rank `root`
    /// positions before this rank.
    fn start_messages(
        &self,
        suite: &mut CaseContext<'_>,
        comm: &dyn Communicator,
    ) -> Result<Vec<StartedCall>, ConformanceError> {
        let (ranks, size, own) = (comm.group().ranks(), comm.size(), comm.rank());
        let step = self.root % size;
        if step == 0 && !suite.options.self_messages {
            return Ok(Vec::new());
        }
        let (to, from) = ((own + step) % size, (own + size - step) % size);
        let message = |index: usize| self.data.whole(self.dtype, ranks[index], self.len);
        let sent = suite.send(comm, to, message(own))?;
        Ok(vec![sent, suite.receive(comm, from, message(from))?])
    }
}

/// Runs random programs one after the other on the same groups. The options contain the number of programs.
pub(super) fn random(suite: &mut CaseContext<'_>) -> CheckResult {
    let (world, options) = (suite.world, suite.options);
    let mut comms: Vec<Arc<dyn Communicator>> = vec![Arc::clone(world)];
    for (name, groups) in partitions(world.group().ranks()) {
        comms.push(suite.split(&**world, name, &groups)?);
    }
    for program in 0..options.programs {
        let run = run(suite, options, &comms, program);
        run.map_err(|error| in_program(error, program, options.seed))?;
    }
    Ok(())
}

fn run(
    suite: &mut CaseContext<'_>,
    options: &ConformanceOptions,
    comms: &[Arc<dyn Communicator>],
    program: usize,
) -> CheckResult {
    let mut rng = ProgramRng::new(options.seed, program);
    let (own, ranks) = (suite.world.rank(), 0..suite.world.size());
    let mut in_flight: Vec<(usize, StartedCall)> = Vec::new();
    for now in 0..options.steps {
        let step = ProgramStep::draw(&mut rng, comms.len(), suite);
        // Every rank waits for its result after a different number of steps.
        let delays: Vec<usize> = ranks.clone().map(|_| rng.below(6)).collect();
        let pauses: Vec<usize> = ranks.clone().map(|_| rng.below(256)).collect();
        let due = now + delays[own];
        // About one rank in ten is slightly later than the others.
        if pauses[own] > 230 {
            sleep(Duration::from_micros(pauses[own] as u64));
        }
        let started = step.start(suite, &*comms[step.group])?;
        in_flight.extend(started.into_iter().map(|call| (due, call)));
        // Waits for the newest call first, which is not the order in which the calls were started.
        let due_now: Vec<_> = in_flight.extract_if(.., |(due, _)| *due <= now).collect();
        suite.wait_reversed(due_now.into_iter().map(|(_, call)| call).collect())?;
    }
    suite.wait_reversed(in_flight.into_iter().map(|(_, call)| call).collect())
}

/// Adds the number of the program and the seed to the call in an error.
fn in_program(error: ConformanceError, program: usize, seed: u64) -> ConformanceError {
    let mut error = error;
    if let ConformanceError::Wrong { call, .. } | ConformanceError::Failed { call, .. } = &mut error
    {
        *call = format!("program {program} of seed {seed}, {call}");
    }
    error
}
