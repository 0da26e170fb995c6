//! The error of a collective or a message, and [`raise`] for code that cannot return a `Result`.

use std::error::Error;
use std::panic::resume_unwind;
use std::time::Duration;

use burn_megatron_rendezvous::ranks_verb;

use crate::communicator::Group;

/// The reason why a collective, a send or a receive failed. Ranks are world ranks. Operations are described with their
/// length and type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks of a group issued different operations with the same sequence number.
    #[error(
        "mismatch at call {sequence} over {group}: rank {first_rank} is in {first_call}, \
         rank {second_rank} in {second_call}: {reason}"
    )]
    Mismatch {
        /// The name of the group, with its ranks.
        group: String,
        /// The sequence number of the operation in the group, counted from 0. For a receive, messages are counted
        /// separately for each pair of ranks.
        sequence: u64,
        /// The rank that issued its operation first.
        first_rank: usize,
        /// The operation of the first rank.
        first_call: String,
        /// The other rank.
        second_rank: usize,
        /// The operation of the other rank.
        second_call: String,
        /// A description of the difference between the two operations.
        reason: String,
    },
    /// Some ranks did not join an operation before the timeout.
    #[error(
        "deadline: after {:.1} s, {} not joined call {sequence} {call} over {group}, where {} waiting",
        .waited.as_secs_f64(),
        ranks_verb(.missing, "has", "have"),
        ranks_verb(.waiting, "is", "are")
    )]
    Deadline {
        /// The name of the group, with its ranks.
        group: String,
        /// The sequence number of the operation in the group, counted from 0. For a receive, messages are counted
        /// separately for each pair of ranks.
        sequence: u64,
        /// The operation in which the other ranks wait.
        call: String,
        /// The ranks that did not join.
        missing: Vec<usize>,
        /// The ranks that joined.
        waiting: Vec<usize>,
        /// The time that this rank has waited.
        waited: Duration,
    },
    /// Another rank failed. This ends the world: every later operation fails.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// The error message of the failed rank.
        message: String,
    },
    /// A rank ended without joining an operation in which other ranks wait.
    #[error("rank {rank} has returned without joining call {sequence} {call} over {group}")]
    PeerFinished {
        /// The rank that ended.
        rank: usize,
        /// The name of the group, with its ranks.
        group: String,
        /// The sequence number of the operation in the group, counted from 0. For a receive, messages are counted
        /// separately for each pair of ranks.
        sequence: u64,
        /// The operation in which this rank waits.
        call: String,
    },
    /// The arguments of the operation are invalid. Nothing was sent.
    #[error("invalid call {call} over {group}: {reason}")]
    InvalidCall {
        /// The name of the group, with its ranks.
        group: String,
        /// The invalid operation.
        call: String,
        /// The given value and the expected value.
        reason: String,
    },
    /// The transport of an engine reported an error, or a wrapper injected one.
    #[error("{engine}: {message}")]
    Engine {
        /// The name of the engine or wrapper.
        engine: String,
        /// The error message.
        message: String,
    },
}

impl CommError {
    /// Creates the error [`CommError::Engine`] of an engine or a wrapper.
    pub fn engine(engine: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Engine {
            engine: engine.into(),
            message: message.into(),
        }
    }

    /// Creates the error for a call over `group` with invalid arguments.
    pub(crate) fn invalid_call(
        group: &Group,
        call: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self::InvalidCall {
            group: group.to_string(),
            call: call.into(),
            reason: reason.into(),
        }
    }
}

/// Raises an error in code that cannot return a `Result`, such as a forward or backward pass.
///
/// Panics without running the panic hook, so no message is printed. [`World::run`](crate::World::run) catches the panic
/// and returns the error.
pub fn raise(error: CommError) -> ! {
    resume_unwind(Box::new(error))
}

/// Returns the message of an error followed by the messages of its sources. Skips messages that are already included.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !message.contains(&text) {
            message = format!("{message}: {text}");
        }
        cause = error.source();
    }
    message
}
