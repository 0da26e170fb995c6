//! What is wrong with the variables of a launcher.

use super::address::AddressError;
use super::node_list::NodeListError;

/// Variables that name no rank, or contradict one another. They are given as `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A value that is not of the kind that the variable has.
    #[error("{variable} cannot be read: {fits} would fit")]
    Value {
        /// The variable.
        variable: String,
        /// What would fit.
        fits: &'static str,
    },
    /// A variable that others call for is not set.
    #[error("{found} is set, but {missing} is not: {cure}")]
    Missing {
        /// What is set.
        found: String,
        /// What is not.
        missing: String,
        /// What helps.
        cure: &'static str,
    },
    /// An index that is not below the number that it counts in.
    #[error("{index} is not below {size}: {} would fit", fitting(.fits))]
    Outside {
        /// The index.
        index: String,
        /// The number.
        size: String,
        /// The indices that would fit: those from 0 to below this.
        fits: usize,
    },
    /// More ranks on one machine than in the world.
    #[error("{local} is more than {world}: at most {fits} of its ranks can be on one machine")]
    MoreThanAll {
        /// The ranks of this machine.
        local: String,
        /// The ranks of the world.
        world: String,
        /// The most that would fit.
        fits: usize,
    },
    /// Two variables that should say the same.
    #[error(
        "{first} and {second} disagree about the {what}: unset one of them, or make them equal"
    )]
    Disagree {
        /// What they are about.
        what: &'static str,
        /// One of them.
        first: String,
        /// The other one.
        second: String,
    },
    /// A rendezvous that is no address.
    #[error("{variable} is no address for the rendezvous: {source}")]
    Address {
        /// The variable.
        variable: String,
        /// What is wrong with it.
        source: AddressError,
    },
    /// The port above `MASTER_PORT`, which torchrun's agent listens on itself, does not exist.
    #[error(
        "{variable} leaves no port above it for the rendezvous, as torchrun's agent listens on that \
         one itself: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    )]
    NoPortAbove {
        /// The variable.
        variable: String,
    },
    /// A token that is none. It does not stand in the message.
    #[error("{0}")]
    Token(String),
    /// A list of hosts that Slurm does not write so.
    #[error("{variable} is no list of hosts: {source}")]
    NodeList {
        /// The variable.
        variable: String,
        /// What is wrong with it.
        source: NodeListError,
    },
}

fn fitting(below: &usize) -> String {
    match below {
        0 => "nothing".into(),
        1 => "only 0".into(),
        _ => format!("0 to {}", below - 1),
    }
}
