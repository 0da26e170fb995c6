//! Random programs of collectives and messages over several groups, against the serial model.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use burn_megatron_kernels::philox::Stream;

use super::groups::partitions;
use super::model::Part;
use super::operations::exchange;
use super::suite::{Checked, Flight, Suite};
use super::values::Data;
use super::{ConformanceError, Options};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, ReduceOp};
use crate::communicator::Communicator;

/// The draws of one program, the same on every rank.
struct Draws {
    stream: Stream,
    next: u64,
}

impl Draws {
    fn new(seed: u64, program: usize) -> Self {
        // The high half of the position: the numbers of the calls are drawn from the low ones.
        let stream = Stream::new(seed, (program as u64) << 32 | 1 << 31);
        Self { stream, next: 0 }
    }

    /// A number below `count`.
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

/// What every rank does at one step, each in its own part of the split `group`.
#[derive(Clone, Copy, Debug)]
struct Step {
    group: usize,
    operation: usize,
    op: ReduceOp,
    dtype: DType,
    len: usize,
    root: usize,
    data: Data,
}

/// Kinds of steps.
const OPERATIONS: usize = 8;

impl Step {
    fn draw(draws: &mut Draws, groups: usize, suite: &Suite<'_>) -> Self {
        let dtype = draws.of(&suite.options.dtypes);
        let mut ops = vec![ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];
        if dtype.is_float() {
            ops.push(ReduceOp::Average);
        }
        let seed = (draws.below(1 << 31) as u64) << 31 | draws.below(1 << 31) as u64;
        Self {
            group: draws.below(groups),
            operation: draws.below(OPERATIONS),
            op: draws.of(&ops),
            dtype,
            len: draws.of(&[0, 1, 2, 3, 5, 17, 300]),
            root: draws.below(suite.world.size()),
            data: suite.data_of(seed),
        }
    }

    fn part(&self, comm: &dyn Communicator, index: usize, operation: usize) -> Part {
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
        suite: &mut Suite<'_>,
        comm: &dyn Communicator,
    ) -> Result<Vec<Flight>, ConformanceError> {
        match self.operation {
            6 => self.start_messages(suite, comm),
            7 => {
                let part = |operation: usize| move |index: usize| self.part(comm, index, operation);
                let (first, second) = (part(self.root % 6), part((self.root + 1) % 6));
                suite.start_all(comm, &[&first, &second])
            }
            operation => {
                let flight = suite.start(comm, |index| self.part(comm, index, operation))?;
                Ok(vec![flight])
            }
        }
    }

    /// Gives to the rank that is `root` further, and gets from the one as far before.
    fn start_messages(
        &self,
        suite: &mut Suite<'_>,
        comm: &dyn Communicator,
    ) -> Result<Vec<Flight>, ConformanceError> {
        let (ranks, size, own) = (comm.group().ranks(), comm.size(), comm.rank());
        let step = self.root % size;
        if step == 0 && !suite.options.self_messages {
            return Ok(Vec::new());
        }
        let (to, from) = ((own + step) % size, (own + size - step) % size);
        let letter = |index: usize| self.data.whole(self.dtype, ranks[index], self.len);
        let sent = suite.send(comm, to, letter(own))?;
        Ok(vec![sent, suite.receive(comm, from, letter(from))?])
    }
}

/// Runs as many programs as the options say, one after the other on the same groups.
pub(super) fn random(suite: &mut Suite<'_>) -> Checked {
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
    suite: &mut Suite<'_>,
    options: &Options,
    comms: &[Arc<dyn Communicator>],
    program: usize,
) -> Checked {
    let mut draws = Draws::new(options.seed, program);
    let (own, ranks) = (suite.world.rank(), 0..suite.world.size());
    let mut flying: Vec<(usize, Flight)> = Vec::new();
    for now in 0..options.steps {
        let step = Step::draw(&mut draws, comms.len(), suite);
        // Every rank fetches its result after a number of steps of its own.
        let delays: Vec<usize> = ranks.clone().map(|_| draws.below(6)).collect();
        let pauses: Vec<usize> = ranks.clone().map(|_| draws.below(256)).collect();
        let due = now + delays[own];
        // One in ten comes a little later than the others.
        if pauses[own] > 230 {
            sleep(Duration::from_micros(pauses[own] as u64));
        }
        let started = step.start(suite, &*comms[step.group])?;
        flying.extend(started.into_iter().map(|flight| (due, flight)));
        // The newest first: not the order in which they were started.
        let landing: Vec<_> = flying.extract_if(.., |(due, _)| *due <= now).collect();
        suite.land_reversed(landing.into_iter().map(|(_, flight)| flight).collect())?;
    }
    suite.land_reversed(flying.into_iter().map(|(_, flight)| flight).collect())
}

/// Names the program in an error.
fn in_program(error: ConformanceError, program: usize, seed: u64) -> ConformanceError {
    let mut error = error;
    if let ConformanceError::Wrong { call, .. } | ConformanceError::Failed { call, .. } = &mut error
    {
        *call = format!("program {program} of seed {seed}, {call}");
    }
    error
}
