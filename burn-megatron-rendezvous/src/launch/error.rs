//! The errors in the environment variables that a launcher sets.

use super::address::AddressError;
use super::node_list::NodeListError;

/// The error for environment variables that do not describe a rank or that contradict each other. Messages show the
/// variables as `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchEnvError {
    /// The value of a variable is invalid.
    #[error("invalid {variable}: expected {expected}")]
    Value {
        /// The variable, as `NAME=value`.
        variable: String,
        /// A description of the valid values.
        expected: &'static str,
    },
    /// A variable is set, but another variable that it requires is not set.
    #[error("{found} is set, but {missing} is not: {hint}")]
    Missing {
        /// The variable that is set.
        found: String,
        /// The variable that is missing.
        missing: String,
        /// A hint for the user.
        hint: &'static str,
    },
    /// A rank or local rank is not less than the number of ranks.
    #[error("invalid {index}: expected {}, below {size}", indices(.limit))]
    OutOfRange {
        /// The variable with the rank, as `NAME=value`.
        index: String,
        /// The variable with the number of ranks, as `NAME=value`.
        size: String,
        /// The number of ranks.
        limit: usize,
    },
    /// The number of ranks on this machine exceeds the total number of ranks.
    #[error("invalid {local}: expected at most {limit}, as {world}")]
    TooManyLocalRanks {
        /// The variable with the number of ranks on this machine, as `NAME=value`.
        local: String,
        /// The variable with the total number of ranks, as `NAME=value`.
        world: String,
        /// The total number of ranks.
        limit: usize,
    },
    /// Two variables have different values, but their values must be equal.
    #[error("conflicting {what}: {first} and {second}; unset one of them, or make them equal")]
    Conflict {
        /// The name of the setting.
        what: &'static str,
        /// The first variable, as `NAME=value`.
        first: String,
        /// The second variable, as `NAME=value`.
        second: String,
    },
    /// The address of the rendezvous is invalid.
    #[error("invalid rendezvous address {variable}: {source}")]
    Address {
        /// The variable with the address.
        variable: String,
        /// The reason why the address is invalid.
        source: AddressError,
    },
    /// The rendezvous requires the port above `MASTER_PORT`, because torchrun's agent listens on `MASTER_PORT`. But
    /// `MASTER_PORT` is already the highest possible port.
    #[error(
        "{variable} leaves no port above it for the rendezvous, because torchrun's agent already listens on \
         {variable}: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    )]
    NoPortAbove {
        /// The variable with the port.
        variable: String,
    },
    /// The value of the token variable is not a valid token. The message does not contain the token.
    #[error("{0}")]
    Token(String),
    /// The list of hosts does not have Slurm's format.
    #[error("invalid host list {variable}: {source}")]
    NodeList {
        /// The variable with the list of hosts.
        variable: String,
        /// The reason why the list is invalid.
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
