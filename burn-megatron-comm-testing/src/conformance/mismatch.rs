//! Ranks whose calls differ.

use std::sync::Arc;

use strum::VariantArray as _;

use super::ConformanceError;
use super::suite::{CaseContext, describe};
use burn_megatron_comm::{Buffer, Call, CommError, Communicator, DType, ReduceOp};

/// What differs between the ranks' calls.
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

/// The name is not that of a [`MismatchCase`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid mismatch {0:?}: expected operation, type, length, root, reduction or message-length"
)]
pub struct UnknownMismatchCase(String);

impl UnknownMismatchCase {
    fn new(text: &str) -> Self {
        Self(text.into())
    }
}

impl MismatchCase {
    /// All of them.
    pub const ALL: [MismatchCase; 6] = *Self::VARIANTS.as_array().unwrap();

    /// The name, for example `"message-length"`.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The call of a rank; `None` if it makes none.
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

/// Makes one call in which the last rank's differs from the others', and returns the error of this rank: a
/// [`CommError::Mismatch`], or, where the engine reports it on some ranks only, a [`CommError::Deadline`],
/// [`CommError::PeerFailed`] or [`CommError::PeerFinished`]. It is `None` on a rank that gets no error: the
/// sender of the message, and a rank that makes no call. At least one rank must get the mismatch, which only the
/// caller can check.
///
/// Collective: call on all ranks with the same case. `world` cannot be used afterwards.
///
/// # Errors
/// [`ConformanceError::TooFewRanks`] on a world of one; [`ConformanceError::Wrong`] if the call succeeded,
/// [`ConformanceError::Failed`] if it failed with another error.
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
            let difference = format!("it gave {len} {dtype}, expected an error of the mismatch");
            Err(suite.wrong(text, difference))
        }
    }
}
