//! Ranks that disagree about a call.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use super::ConformanceError;
use super::suite::{Suite, describe};
use crate::buffer::{Buffer, DType};
use crate::call::{Call, ReduceOp};
use crate::communicator::Communicator;
use crate::error::CommError;

/// In what the ranks disagree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mismatch {
    /// The last rank makes another operation.
    Operation,
    /// The last rank gives another type.
    Type,
    /// The last rank gives an element more.
    Length,
    /// The last rank names another root.
    Root,
    /// The last rank reduces in another way.
    Reduction,
    /// The last rank expects a shorter message than the first one sends.
    MessageLength,
}

/// A name of no [`Mismatch`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no mismatch; there are operation, type, length, root, reduction, message-length")]
pub struct UnknownMismatch(String);

impl Mismatch {
    /// All of them.
    pub const ALL: [Mismatch; 6] = [
        Mismatch::Operation,
        Mismatch::Type,
        Mismatch::Length,
        Mismatch::Root,
        Mismatch::Reduction,
        Mismatch::MessageLength,
    ];

    /// The name, for example `"message-length"`.
    pub fn name(self) -> &'static str {
        match self {
            Mismatch::Operation => "operation",
            Mismatch::Type => "type",
            Mismatch::Length => "length",
            Mismatch::Root => "root",
            Mismatch::Reduction => "reduction",
            Mismatch::MessageLength => "message-length",
        }
    }

    /// The part of a rank in the call; none if it has no part in it.
    fn part(self, comm: &dyn Communicator) -> Option<(Call, Buffer)> {
        let (first, last) = (comm.rank() == 0, comm.rank() + 1 == comm.size());
        let ones = |len: usize| Buffer::from(vec![1f32; len]);
        let sum = Call::AllReduce(ReduceOp::Sum);
        Some(match (self, last) {
            (Mismatch::Operation, true) => (Call::AllGather, ones(4)),
            (Mismatch::Type, true) => (sum, vec![1i32; 4].into()),
            (Mismatch::Length, true) => (sum, ones(5)),
            (Mismatch::Root, _) => {
                let root = usize::from(last);
                (Call::Broadcast { root }, ones(4))
            }
            (Mismatch::Reduction, true) => (Call::AllReduce(ReduceOp::Max), ones(4)),
            (Mismatch::MessageLength, true) => {
                let (from, dtype, len) = (0, DType::F32, 3);
                (Call::Receive { from, dtype, len }, ones(0))
            }
            (Mismatch::MessageLength, false) if first => {
                let to = comm.size() - 1;
                (Call::Send { to }, ones(4))
            }
            (Mismatch::MessageLength, false) => return None,
            _ => (sum, ones(4)),
        })
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mismatch {
    type Err = UnknownMismatch;

    fn from_str(text: &str) -> Result<Self, UnknownMismatch> {
        let mut all = Self::ALL.into_iter();
        all.find(|mismatch| mismatch.name() == text)
            .ok_or_else(|| UnknownMismatch(text.to_owned()))
    }
}

/// Makes one call in which the last rank disagrees with the others, and returns what this rank was told:
/// a [`CommError::Mismatch`], or, where the engine tells only some ranks, a [`CommError::Deadline`],
/// [`CommError::PeerFailed`] or [`CommError::PeerFinished`]. It is `None` on a rank that need not be told:
/// whoever sends the message, and whoever has no part in it. At least one rank must be told of the
/// mismatch, which only the caller can see.
///
/// Every rank calls it with the same case. It leaves `world` of no further use, so it can be called once.
///
/// # Errors
/// [`ConformanceError::TooFewRanks`] on a world of one; [`ConformanceError::Wrong`] if the call went
/// through, [`ConformanceError::Failed`] if it failed with anything else.
pub fn mismatch_cases(
    world: &Arc<dyn Communicator>,
    case: Mismatch,
) -> Result<Option<CommError>, ConformanceError> {
    let name = case.name();
    if world.size() < 2 {
        return Err(ConformanceError::TooFewRanks {
            case: name,
            least: 2,
            ranks: world.size(),
        });
    }
    let Some((call, input)) = case.part(&**world) else {
        return Ok(None);
    };
    let options = super::Options::default();
    let suite = Suite::new(world, &options, name);
    let text = describe(&**world, &call, &input);
    let is_send = matches!(call, Call::Send { .. });
    match world.start(call, input).and_then(|call| call.wait()) {
        Err(
            error @ (CommError::Mismatch { .. }
            | CommError::Deadline { .. }
            | CommError::PeerFailed { .. }
            | CommError::PeerFinished { .. }),
        ) => Ok(Some(error)),
        Err(error) => Err(suite.failed(text, error)),
        Ok(_) if is_send => Ok(None),
        Ok(found) => {
            let (len, dtype) = (found.len(), found.dtype());
            let difference = format!("it gave {len} {dtype}, expected an error of the mismatch");
            Err(suite.wrong(text, difference))
        }
    }
}
