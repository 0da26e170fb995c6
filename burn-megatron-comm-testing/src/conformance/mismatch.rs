//! Tests in which ranks issue different calls.

use std::sync::Arc;

use strum::VariantArray as _;

use super::ConformanceError;
use super::suite::{CaseContext, describe};
use burn_megatron_comm::{Buffer, Call, CommError, Communicator, DType, ReduceOp};

/// A test case in which the call of one rank differs from the calls of the other ranks.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[strum(
    serialize_all = "kebab-case",
    parse_err_ty = UnknownMismatchCase,
    parse_err_fn = UnknownMismatchCase::new
)]
pub enum MismatchCase {
    /// The last rank calls a different operation.
    Operation,
    /// The last rank passes a different element type.
    Type,
    /// The last rank passes one element more than the other ranks.
    Length,
    /// The last rank passes a different root.
    Root,
    /// The last rank uses a different reduction.
    Reduction,
    /// The last rank expects a shorter message than the first rank sends.
    MessageLength,
}

/// The error for a string that is not the name of a [`MismatchCase`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid kind of mismatch {0:?}: expected operation, type, length, root, reduction or message-length"
)]
pub struct UnknownMismatchCase(String);

impl UnknownMismatchCase {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl MismatchCase {
    /// The list of all cases.
    pub const ALL: [MismatchCase; 6] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name of the case, for example `"message-length"`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the call of this rank, or `None` if it makes no call.
    fn part(self, comm: &dyn Communicator) -> Option<(Call, Buffer)> {
        let (first, last) = (comm.rank() == 0, comm.rank() + 1 == comm.size());
        let ones = |len: usize| Buffer::from(vec![1f32; len]);
        let sum = Call::AllReduce(ReduceOp::Sum);
        Some(match (self, last) {
            (MismatchCase::Operation, true) => (Call::AllGather, ones(4)),
            (MismatchCase::Type, true) => (sum, vec![1i32; 4].into()),
            (MismatchCase::Length, true) => (sum, ones(5)),
            (MismatchCase::Root, _) => {
                let root = usize::from(last);
                (Call::Broadcast { root }, ones(4))
            }
            (MismatchCase::Reduction, true) => (Call::AllReduce(ReduceOp::Max), ones(4)),
            (MismatchCase::MessageLength, true) => {
                let (from, dtype, len) = (0, DType::F32, 3);
                (Call::Receive { from, dtype, len }, ones(0))
            }
            (MismatchCase::MessageLength, false) if first => {
                let to = comm.size() - 1;
                (Call::Send { to }, ones(4))
            }
            (MismatchCase::MessageLength, false) => return None,
            _ => (sum, ones(4)),
        })
    }
}

/// Issues one call on each rank, where the call of the last rank differs from the calls of the other ranks. Returns the
/// error on this rank.
///
/// The error is usually a [`CommError::Mismatch`]. If the engine reports the mismatch only on some ranks, the other
/// ranks may return [`CommError::Deadline`], [`CommError::PeerFailed`] or [`CommError::PeerFinished`]. The result is
/// `None` on a rank that gets no error because it only sends a message or makes no call. At least one rank must return
/// the mismatch. The caller must check this condition.
///
/// Collective: call on all ranks with the same `case`. The communicator `world` cannot be used afterwards.
///
/// # Errors
/// [`ConformanceError::TooFewRanks`] if the world has only one rank. [`ConformanceError::Wrong`] if the call succeeded.
/// [`ConformanceError::Failed`] if the call failed with a different error.
pub fn run_mismatch_case(
    world: &Arc<dyn Communicator>,
    case: MismatchCase,
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
    let options = super::ConformanceOptions::default();
    let suite = CaseContext::new(world, &options, name);
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
            let difference = format!("the call returned {len} {dtype}: expected a mismatch error");
            Err(suite.wrong(text, difference))
        }
    }
}
