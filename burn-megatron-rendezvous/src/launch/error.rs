//! Errors in the environment variables of a launcher.

use super::address::AddressError;
use super::node_list::NodeListError;

/// An error about environment variables that do not describe a rank or contradict each other. Messages quote the
/// variables as `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchEnvError {
    /// A value has the wrong kind.
    #[error("invalid {variable}: expected {expected}")]
    Value {
        /// The variable.
        variable: String,
        /// The expected kind.
        expected: &'static str,
    },
    /// A variable that another variable requires is not set.
    #[error("{found} is set, but {missing} is not: {hint}")]
    Missing {
        /// The variable that is set.
        found: String,
        /// The missing variable.
        missing: String,
        /// A hint how to fix the error.
        hint: &'static str,
    },
    /// An index is not less than its size.
    #[error("invalid {index}: expected {}, below {size}", indices(.limit))]
    OutOfRange {
        /// The index.
        index: String,
        /// The size.
        size: String,
        /// The value of the size.
        limit: usize,
    },
    /// There are more local ranks than ranks.
    #[error("invalid {local}: expected at most {limit}, as {world}")]
    TooManyLocalRanks {
        /// The local world size.
        local: String,
        /// The world size.
        world: String,
        /// The value of the world size.
        limit: usize,
    },
    /// Two variables that must be equal differ.
    #[error("conflicting {what}: {first} and {second}; unset one of them, or make them equal")]
    Conflict {
        /// The setting.
        what: &'static str,
        /// The first variable.
        first: String,
        /// The second variable.
        second: String,
    },
    /// The address of the rendezvous is invalid.
    #[error("invalid rendezvous address {variable}: {source}")]
    Address {
        /// The variable.
        variable: String,
        /// The error of the address.
        source: AddressError,
    },
    /// There is no port above `MASTER_PORT`. torchrun's agent itself listens on `MASTER_PORT`.
    #[error(
        "{variable} leaves no port above it for the rendezvous, because torchrun's agent already listens on \
         {variable}: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    )]
    NoPortAbove {
        /// The variable.
        variable: String,
    },
    /// The token is invalid. The message does not contain the token.
    #[error("{0}")]
    Token(String),
    /// The host list is not in Slurm's format.
    #[error("invalid host list {variable}: {source}")]
    NodeList {
        /// The variable.
        variable: String,
        /// The error of the list.
        source: NodeListError,
    },
}

/// Describes the valid indices below `limit`.
fn indices(limit: &usize) -> String {
    match limit {
        0 => "none".into(),
        1 => "0".into(),
        _ => format!("0 to {}", limit - 1),
    }
}
