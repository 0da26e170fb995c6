//! Functions that all test cases use. They issue calls and compare the results with the reference.

use std::sync::Arc;

use super::model::{self, MemberCall};
use super::values::{Expected, TestData};
use super::{ConformanceError, ConformanceOptions};
use burn_megatron_comm::{Buffer, Call, CommError, Communicator, DType, Pending, ReduceOp};

pub(super) type CheckResult = Result<(), ConformanceError>;

/// The state of one test case on one rank.
pub(super) struct CaseContext<'a> {
    pub world: &'a Arc<dyn Communicator>,
    pub options: &'a ConformanceOptions,
    case: &'static str,
    /// The number of results that were compared so far.
    checks: u64,
    /// The number of calls for which input data was generated so far.
    drawn: u64,
}

/// A started call and its expected result. A send has no expected result.
pub(super) struct StartedCall {
    pending: Pending,
    call: String,
    expected: Option<Expected>,
}

impl<'a> CaseContext<'a> {
    pub fn new(
        world: &'a Arc<dyn Communicator>,
        options: &'a ConformanceOptions,
        case: &'static str,
    ) -> Self {
        Self {
            world,
            options,
            case,
            checks: 0,
            drawn: 0,
        }
    }

    /// Returns the input data of the next call. The data is the same on all ranks that have called this method the same
    /// number of times.
    pub fn data(&mut self) -> TestData {
        self.drawn += 1;
        let seed = self.options.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self.drawn;
        self.data_of(seed)
    }

    /// Returns the input data for a seed. The numbers are so small that `bf16` can represent their sums over up to 255
    /// ranks exactly.
    pub fn data_of(&self, seed: u64) -> TestData {
        let most = (255 / self.world.size() as i64).clamp(1, 60);
        TestData { seed, most }
    }

    /// Returns the floating-point types among the element types in the options.
    pub fn floats(&self) -> Vec<DType> {
        let floats = self.options.dtypes.iter().copied();
        floats.filter(|dtype| dtype.is_float()).collect()
    }

    /// Starts a collective. `part` returns the call of each member, given the index of the member.
    pub fn start(
        &mut self,
        comm: &dyn Communicator,
        part: impl Fn(usize) -> MemberCall,
    ) -> Result<StartedCall, ConformanceError> {
        let (expected, own) = self.expect(comm, part);
        self.launch(comm, own, Some(expected))
    }

    fn launch(
        &self,
        comm: &dyn Communicator,
        (call, input): MemberCall,
        expected: Option<Expected>,
    ) -> Result<StartedCall, ConformanceError> {
        let text = describe(comm, &call, &input);
        match comm.start(call, input) {
            Ok(pending) => Ok(StartedCall {
                pending,
                call: text,
                expected,
            }),
            Err(error) => Err(self.failed(text, error)),
        }
    }

    /// Returns the expected result of this rank and a description of its call.
    fn expect(
        &self,
        comm: &dyn Communicator,
        part: impl Fn(usize) -> MemberCall,
    ) -> (Expected, MemberCall) {
        let mut parts: Vec<MemberCall> = (0..comm.size()).map(part).collect();
        let expected = model::expected(&parts, comm.rank(), self.options.fixed_order);
        (expected, parts.swap_remove(comm.rank()))
    }

    /// Starts several collectives together. Each collective is given by the calls of all members.
    pub fn start_all(
        &mut self,
        comm: &dyn Communicator,
        calls: &[&dyn Fn(usize) -> MemberCall],
    ) -> Result<Vec<StartedCall>, ConformanceError> {
        let prepared = calls.iter().map(|part| self.expect(comm, part));
        let (expected, parts): (Vec<Expected>, Vec<MemberCall>) = prepared.unzip();
        let texts: Vec<String> = parts
            .iter()
            .map(|(call, input)| describe(comm, call, input))
            .collect();
        let all = format!("start_all of {} calls over {}", calls.len(), comm.group());
        let handles = comm.start_all(parts);
        let handles = handles.map_err(|error| self.failed(all.clone(), error))?;
        let number = format!("{} handles", handles.len());
        self.text(all, number, format!("{} handles", calls.len()))?;
        let started = handles.into_iter().zip(texts).zip(expected);
        let to_started = |((pending, call), expected)| StartedCall {
            pending,
            call,
            expected: Some(expected),
        };
        Ok(started.map(to_started).collect())
    }

    /// Waits for a result and compares it with the expected result.
    pub fn wait(&mut self, started: StartedCall) -> CheckResult {
        let StartedCall {
            pending,
            call,
            expected,
        } = started;
        match (pending.wait(), expected) {
            (Err(error), _) => Err(self.failed(call, error)),
            (Ok(_), None) => Ok(()),
            (Ok(found), Some(expected)) => self.compare(call, &expected, &found),
        }
    }

    /// Compares a result with the expected result.
    pub fn compare(&mut self, call: String, expected: &Expected, found: &Buffer) -> CheckResult {
        if let Some(difference) = expected.difference(found) {
            return Err(self.wrong(call, difference));
        }
        self.checks += 1;
        Ok(())
    }

    /// Checks that a call was rejected as invalid.
    pub fn refused<T>(&mut self, call: &str, result: Result<T, CommError>) -> CheckResult {
        match result {
            Err(CommError::InvalidCall { .. }) => {
                self.checks += 1;
                Ok(())
            }
            Err(error) => Err(self.failed(call.to_owned(), error)),
            Ok(_) => {
                let difference = "the call was started: expected an InvalidCall error".to_owned();
                Err(self.wrong(call.to_owned(), difference))
            }
        }
    }

    /// Waits for results in reverse order.
    pub fn wait_reversed(&mut self, started: Vec<StartedCall>) -> CheckResult {
        started.into_iter().rev().try_for_each(|one| self.wait(one))
    }

    /// Runs a collective. `input` returns the input of each member, given its world rank.
    pub fn collective(
        &mut self,
        comm: &dyn Communicator,
        call: &Call,
        input: impl Fn(usize) -> Buffer,
    ) -> CheckResult {
        let ranks = comm.group().ranks();
        let started = self.start(comm, |index| (call.clone(), input(ranks[index])))?;
        self.wait(started)
    }

    /// Runs a collective as [`collective`](Self::collective) does, on new inputs that contain whole numbers.
    pub fn whole(
        &mut self,
        comm: &dyn Communicator,
        call: &Call,
        dtype: DType,
        len: usize,
    ) -> CheckResult {
        let data = self.data();
        self.collective(comm, call, |rank| data.whole(dtype, rank, len))
    }

    /// Starts a send.
    pub fn send(
        &mut self,
        comm: &dyn Communicator,
        to: usize,
        input: Buffer,
    ) -> Result<StartedCall, ConformanceError> {
        self.launch(comm, (Call::Send { to }, input), None)
    }

    /// Starts the receive of a message. `expected` is the expected content of the message.
    pub fn receive(
        &mut self,
        comm: &dyn Communicator,
        from: usize,
        expected: Buffer,
    ) -> Result<StartedCall, ConformanceError> {
        let (dtype, len) = (expected.dtype(), expected.len());
        let call = Call::Receive { from, dtype, len };
        let expected = Expected::exactly(expected);
        self.launch(comm, (call, Buffer::empty(dtype)), Some(expected))
    }

    /// Returns the members with which this rank may exchange messages.
    pub fn peers(&self, comm: &dyn Communicator) -> Vec<usize> {
        let may = |peer: &usize| self.options.self_messages || *peer != comm.rank();
        (0..comm.size()).filter(may).collect()
    }

    /// Runs a barrier over all members.
    pub fn barrier(&mut self, comm: &dyn Communicator) -> CheckResult {
        comm.barrier()
            .map_err(|error| self.failed(format!("barrier over {}", comm.group()), error))
    }

    /// Splits a communicator and checks the group of the returned part.
    pub fn split(
        &mut self,
        comm: &dyn Communicator,
        name: &str,
        groups: &[Vec<usize>],
    ) -> Result<Arc<dyn Communicator>, ConformanceError> {
        let text = format!("split {name} of {} into {groups:?}", comm.group());
        let part = comm.split(name, groups);
        let part = part.map_err(|error| self.failed(text.clone(), error))?;
        let place = comm.group().part(name, groups).map(|(_, group)| {
            let (ranks, index) = (group.ranks(), group.index());
            format!("{name} {ranks:?} at index {index} of {}", ranks.len())
        });
        let group = part.group();
        let (ranks, index, size) = (group.ranks(), part.rank(), part.size());
        let found = format!("{} {ranks:?} at index {index} of {size}", group.name());
        self.text(text, found, place.unwrap_or_default())?;
        Ok(part)
    }

    /// Compares two strings.
    pub fn text(&mut self, call: String, found: String, expected: String) -> CheckResult {
        if found != expected {
            return Err(self.wrong(call, format!("found {found}, expected {expected}")));
        }
        self.checks += 1;
        Ok(())
    }

    pub fn wrong(&self, call: String, difference: String) -> ConformanceError {
        ConformanceError::Wrong {
            case: self.case,
            rank: self.world.group().world_rank(),
            call,
            difference,
        }
    }

    pub fn failed(&self, call: String, error: CommError) -> ConformanceError {
        ConformanceError::Failed {
            case: self.case,
            rank: self.world.group().world_rank(),
            call,
            source: Box::new(error),
        }
    }

    /// Ends the test case and returns the number of checks, summed over all ranks.
    pub fn total_checks(&mut self) -> Result<u64, ConformanceError> {
        let (own, world) = (self.checks, self.world);
        let input = Buffer::from(vec![own as i64]);
        let call = describe(&**world, &Call::AllReduce(ReduceOp::Sum), &input);
        let sum = world.all_reduce(input, ReduceOp::Sum);
        match sum.map_err(|error| self.failed(call.clone(), error))? {
            Buffer::I64(sum) if sum.len() == 1 && sum[0] >= own as i64 => Ok(sum[0] as u64),
            other => {
                let text = format!(
                    "the sum of the checks of all ranks is {other:?}: expected at least {own}, the checks of this rank"
                );
                Err(self.wrong(call, text))
            }
        }
    }
}

/// Describes a call with its type, length and group.
pub(super) fn describe(comm: &dyn Communicator, call: &Call, input: &Buffer) -> String {
    let call = call.describe(comm.group(), input);
    format!("{call} over {}", comm.group())
}
