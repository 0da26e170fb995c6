//! What can go wrong in a call, and how it leaves code that returns no `Result`.

use std::error::Error;
use std::panic::resume_unwind;
use std::time::Duration;

/// Why a call did not complete. Ranks are world ranks; calls are given with their shape and type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks of a group are at the same call of that group with different calls.
    #[error(
        "mismatch at call {sequence} over {group}: rank {first_rank} is in {first_call}, \
         rank {second_rank} in {second_call}: {reason}"
    )]
    Mismatch {
        /// The group, with its ranks.
        group: String,
        /// The number of the call in the group, from 0; for a receive, of the message of the pair.
        sequence: u64,
        /// The rank that came first.
        first_rank: usize,
        /// The call of that rank.
        first_call: String,
        /// The rank that disagrees with it.
        second_rank: usize,
        /// The call of that rank.
        second_call: String,
        /// What differs.
        reason: String,
    },
    /// Some ranks did not come within the deadline.
    #[error(
        "deadline: after {:.1} s, {} not come to call {sequence} {call} over {group}, where {} waiting",
        .waited.as_secs_f64(),
        ranks_verb(.missing, "has", "have"),
        ranks_verb(.waiting, "is", "are")
    )]
    Deadline {
        /// The group, with its ranks.
        group: String,
        /// The number of the call in the group, from 0; for a receive, of the message of the pair.
        sequence: u64,
        /// The call that the others wait in.
        call: String,
        /// The ranks that never came.
        missing: Vec<usize>,
        /// The ranks that came.
        waiting: Vec<usize>,
        /// How long this rank has waited.
        waited: Duration,
    },
    /// A rank of the world failed, so that no call can be relied on any more.
    #[error("rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that failed first.
        rank: usize,
        /// What it failed with.
        message: String,
    },
    /// A rank returned without taking part in a call that others wait in.
    #[error("rank {rank} has returned without coming to call {sequence} {call} over {group}")]
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
    /// The call makes no sense on this rank alone. Nothing was sent.
    #[error("invalid call {call} over {group}: {reason}")]
    InvalidCall {
        /// The group, with its ranks.
        group: String,
        /// The call.
        call: String,
        /// What is wrong, and what would fit.
        reason: String,
    },
    /// The transport below an engine reported an error, or a wrapper made one up.
    #[error("{engine}: {message}")]
    Engine {
        /// The engine or wrapper.
        engine: String,
        /// What it reported.
        message: String,
    },
}

/// Leaves code that can return no `Result`, such as a forward or a backward pass, with an error.
///
/// It unwinds without running the panic hook, so nothing is printed; [`World::run`](super::World::run)
/// turns it back into the error.
pub fn raise(error: CommError) -> ! {
    resume_unwind(Box::new(error))
}

/// `"rank 3 has"`, `"ranks 0, 1 have"`; long runs are shortened to `"0-7"`.
pub(super) fn ranks_verb(ranks: &[usize], singular: &str, plural: &str) -> String {
    match ranks {
        [rank] => format!("rank {rank} {singular}"),
        _ => format!("ranks {} {plural}", list_ranks(ranks)),
    }
}

/// `"0, 1, 4"`; more than 16 ranks are written as runs, `"0-31, 40"`.
pub(super) fn list_ranks(ranks: &[usize]) -> String {
    const LONGEST: usize = 16;
    let runs = ranks.chunk_by(|a, b| ranks.len() > LONGEST && *b == a + 1);
    let runs: Vec<String> = runs
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run[0].to_string(),
        })
        .collect();
    runs.join(", ")
}

/// The message of an error with those of its causes, except where it repeats them itself.
pub(super) fn with_causes(error: &dyn Error) -> String {
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
