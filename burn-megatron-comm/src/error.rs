//! The error of a call, and how code that returns no `Result` raises it.

use std::error::Error;
use std::panic::resume_unwind;
use std::time::Duration;

use burn_megatron_rendezvous::ranks_verb;

use crate::communicator::Group;

/// Why a call failed. Ranks are world ranks; calls are described with length and type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks of a group issued different calls under one sequence number.
    #[error(
        "mismatch at call {sequence} over {group}: rank {first_rank} is in {first_call}, \
         rank {second_rank} in {second_call}: {reason}"
    )]
    Mismatch {
        /// The group, with its ranks.
        group: String,
        /// The number of the call in the group, from 0; for a receive, of the message of the pair.
        sequence: u64,
        /// The rank that called first.
        first_rank: usize,
        /// The call of that rank.
        first_call: String,
        /// The other rank.
        second_rank: usize,
        /// The call of that rank.
        second_call: String,
        /// The difference.
        reason: String,
    },
    /// Some ranks did not join a call within the deadline.
    #[error(
        "deadline: after {:.1} s, {} not joined call {sequence} {call} over {group}, where {} waiting",
        .waited.as_secs_f64(),
        ranks_verb(.missing, "has", "have"),
        ranks_verb(.waiting, "is", "are")
    )]
    Deadline {
        /// The group, with its ranks.
        group: String,
        /// The number of the call in the group, from 0; for a receive, of the message of the pair.
        sequence: u64,
        /// The call that the other ranks wait in.
        call: String,
        /// The ranks that did not join.
        missing: Vec<usize>,
        /// The ranks that joined.
        waiting: Vec<usize>,
        /// The time that this rank has waited.
        waited: Duration,
    },
    /// A rank of the world failed, which ends the world: every call fails from then on.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// A rank returned without joining a call that others wait in.
    #[error("rank {rank} has returned without joining call {sequence} {call} over {group}")]
    PeerFinished {
        /// The rank that returned.
        rank: usize,
        /// The group, with its ranks.
        group: String,
        /// The number of the call in the group, from 0; for a receive, of the message of the pair.
        sequence: u64,
        /// The call that this rank waits in.
        call: String,
    },
    /// The arguments of the call are invalid. Nothing was sent.
    #[error("invalid call {call} over {group}: {reason}")]
    InvalidCall {
        /// The group, with its ranks.
        group: String,
        /// The call.
        call: String,
        /// The given value and the expected one.
        reason: String,
    },
    /// The transport of an engine reported an error, or a wrapper injected one.
    #[error("{engine}: {message}")]
    Engine {
        /// The engine or wrapper.
        engine: String,
        /// Its message.
        message: String,
    },
}

impl CommError {
    /// Returns the error of an engine or a wrapper.
    pub fn engine(engine: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Engine {
            engine: engine.into(),
            message: message.into(),
        }
    }

    /// Returns the error of a call over `group` whose arguments are invalid.
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

/// Raises an error from code that cannot return a `Result`, such as a forward or backward pass.
///
/// Unwinds without running the panic hook, so nothing is printed; [`World::run`](crate::World::run)
/// returns the error.
pub fn raise(error: CommError) -> ! {
    resume_unwind(Box::new(error))
}

/// The message of an error with those of its sources, unless it contains them already.
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
