//! Operations between ranks, and their data movement.

use std::slice;

use super::value::{Reduction, Type};
use super::{Failure, argument};
use crate::memory::{Memory, Snapshot};

/// Kind of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AllReduce(Reduction),
    ReduceScatter(Reduction),
    AllGather,
    Broadcast { root: usize },
    Reduce { root: usize, reduction: Reduction },
    Send { to: usize },
    Receive { from: usize },
}

/// A call of one rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub kind: Kind,
    pub of: Type,
    pub count: usize,
    pub from: u64,
    pub to: u64,
}

impl Call {
    /// Returns the sizes of the input and the output of rank `rank` of `size`, in bytes. An unused buffer has size 0.
    fn bytes(&self, rank: usize, size: usize) -> [usize; 2] {
        let one = self.count * self.of.bytes();
        match self.kind {
            Kind::AllReduce(_) => [one, one],
            Kind::ReduceScatter(_) => [one * size, one],
            Kind::AllGather => [one, one * size],
            Kind::Broadcast { root } => [if rank == root { one } else { 0 }, one],
            Kind::Reduce { root, .. } => [one, if rank == root { one } else { 0 }],
            Kind::Send { .. } => [one, 0],
            Kind::Receive { .. } => [0, one],
        }
    }

    /// Checks the arguments that do not depend on other ranks.
    ///
    /// # Errors
    /// Returns an error if the arguments are invalid.
    pub(super) fn check(&self, rank: usize, size: usize) -> Result<(), Failure> {
        let peer = match self.kind {
            Kind::Broadcast { root } | Kind::Reduce { root, .. } => root,
            Kind::Send { to: peer } | Kind::Receive { from: peer } => peer,
            _ => 0,
        };
        if peer >= size {
            return Err(argument(format!(
                "invalid rank {peer}: expected below {size}"
            )));
        }
        let all = self.count.checked_mul(self.of.bytes() * size);
        if all.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(argument(format!("{} elements are too many", self.count)));
        }
        let [input, output] = self.bytes(rank, size);
        for (name, address, bytes) in [("input", self.from, input), ("output", self.to, output)] {
            let aligned = address.is_multiple_of(self.of.bytes() as u64);
            if bytes > 0 && (address == 0 || !aligned) {
                return Err(argument(format!(
                    "the {name} is at {address:#x}: not an address of {:?}",
                    self.of
                )));
            }
        }
        if self.apart_or_in_place(rank, [input, output]) {
            Ok(())
        } else {
            Err(argument(
                "input and output overlap, and the rank's part does not lie where it belongs",
            ))
        }
    }

    fn apart_or_in_place(&self, rank: usize, [input, output]: [usize; 2]) -> bool {
        let (from, to) = (self.from, self.to);
        let apart = from + input as u64 <= to || to + output as u64 <= from;
        let own = (rank * self.count * self.of.bytes()) as u64;
        let in_place = match self.kind {
            Kind::AllGather => from == to + own,
            Kind::ReduceScatter(_) => to == from + own,
            _ => from == to,
        };
        input == 0 || output == 0 || apart || in_place
    }

    /// Returns whether the call of another rank is the same call, or the other side of a message.
    pub(super) fn fits(&self, other: &Self) -> bool {
        let same = (self.of, self.count) == (other.of, other.count);
        let pair = matches!(
            (self.kind, other.kind),
            (Kind::Send { .. }, Kind::Receive { .. }) | (Kind::Receive { .. }, Kind::Send { .. })
        );
        same && (pair || self.kind == other.kind)
    }
}

/// Moves the data of a call that all ranks have made. There is one call per rank, or a sender and a receiver.
///
/// # Errors
/// Returns the first address outside of the device memory.
pub(super) fn execute(calls: &[Call], memory: &Memory) -> Result<(), String> {
    let memory = memory.snapshot();
    let size = calls.len();
    let mut inputs = Vec::with_capacity(size);
    for (rank, call) in calls.iter().enumerate() {
        let [input, output] = call.bytes(rank, size);
        within(&memory, call, rank, call.from, input)?;
        within(&memory, call, rank, call.to, output)?;
        inputs.push(match input {
            0 => &[],
            // SAFETY: the range was checked above. Nothing writes to it while it is read, before the end of this
            // function.
            _ => unsafe { slice::from_raw_parts(call.from as *const u8, input) },
        });
    }
    let Some(first) = calls.first() else {
        return Ok(());
    };
    let result = match first.kind {
        Kind::AllReduce(reduction)
        | Kind::ReduceScatter(reduction)
        | Kind::Reduce { reduction, .. } => first.of.reduce(&inputs, reduction),
        // Other ranks have no input, or all inputs are gathered.
        _ => inputs.concat(),
    };
    for (rank, call) in calls.iter().enumerate() {
        let [_, output] = call.bytes(rank, size);
        let start = match call.kind {
            Kind::ReduceScatter(_) => rank * output,
            _ => 0,
        };
        if output > 0 {
            let part = &result[start..start + output];
            // SAFETY: the range was checked above, and no input is used any more.
            unsafe { (call.to as *mut u8).copy_from(part.as_ptr(), output) };
        }
    }
    Ok(())
}

fn within(
    memory: &Snapshot,
    call: &Call,
    rank: usize,
    address: u64,
    bytes: usize,
) -> Result<(), String> {
    if bytes == 0 || memory.holds(address, bytes) {
        Ok(())
    } else {
        Err(format!(
            "NCCL: {:?} of rank {rank} has {bytes} bytes at {address:#x}, which are not all memory \
             of the device",
            call.kind
        ))
    }
}
