//! Errors in the environment variables of a launcher.

use super::address::AddressError;
use super::node_list::NodeListError;

/// Environment variables that do not describe a rank, or contradict each other. Messages quote them as
/// `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchEnvError {
    /// A value of the wrong kind.
    #[error("invalid {variable}: expected {expected}")]
    Value {
        /// The variable.
        variable: String,
        /// The expected kind.
        expected: &'static str,
    },
    /// A variable that another one requires is not set.
    #[error("{found} is set, but {missing} is not: {hint}")]
    Missing {
        /// The variable that is set.
        found: String,
        /// The missing one.
        missing: String,
        /// A way to fix it.
        hint: &'static str,
    },
    /// An index that is not below its size.
    #[error("invalid {index}: expected {}, below {size}", indices(.limit))]
    OutOfRange {
        /// The index.
        index: String,
        /// The size.
        size: String,
        /// The value of the size.
        limit: usize,
    },
    /// More local ranks than ranks.
    #[error("invalid {local}: expected at most {limit}, as {world}")]
    TooManyLocalRanks {
        /// The local world size.
        local: String,
        /// The world size.
        world: String,
        /// The value of the world size.
        limit: usize,
    },
    /// Two variables that should be equal.
    #[error("conflicting {what}: {first} and {second}; unset one of them, or make them equal")]
    Conflict {
        /// The setting.
        what: &'static str,
        /// One of them.
        first: String,
        /// The other one.
        second: String,
    },
    /// An invalid address of the rendezvous.
    #[error("invalid rendezvous address {variable}: {source}")]
    Address {
        /// The variable.
        variable: String,
        /// The fault of the address.
        source: AddressError,
    },
    /// The port above `MASTER_PORT`, which torchrun's agent listens on itself, does not exist.
    #[error(
        "{variable} leaves no port above it for the rendezvous, because torchrun's agent already listens on \
         {variable}: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    )]
    NoPortAbove {
        /// The variable.
        variable: String,
    },
    /// An invalid token. The message does not contain it.
    #[error("{0}")]
    Token(String),
    /// A host list that is not in Slurm's format.
    #[error("invalid host list {variable}: {source}")]
    NodeList {
        /// The variable.
        variable: String,
        /// The fault of the list.
        source: NodeListError,
    },
}

/// The indices below `limit`, in words.
fn indices(limit: &usize) -> String {
    match limit {
        0 => "none".into(),
        1 => "0".into(),
        _ => format!("0 to {}", limit - 1),
    }
}
