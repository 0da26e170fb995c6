//! The rendezvous of the processes of a world, which also detects failed ranks.
//!
//! The rendezvous transfers no tensors. It informs the ranks when all ranks have joined, and stores small values, such
//! as the addresses of an engine. It collects heartbeats, which contain the position of each rank. After a failure, it
//! sends one failure report to all ranks.
//!
//! There is one [`Coordinator`] per world and one TCP connection per rank. Each connection begins with a handshake in
//! which both sides prove that they have the [token](crate::auth). After the handshake, each message is one line of
//! JSON.

mod client;
mod connect;
mod coordinator;
mod links;
mod message;
mod open_files;
mod rank_slot;
mod registry;
mod session;
mod status_query;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use crate::auth::TOKEN_INSTRUCTIONS;
pub use client::{JoinRequest, RendezvousClient, StatusProvider};
pub use coordinator::Coordinator;
pub use message::{CallId, FailureCause, FailureKind, GroupId, MissingRanks, RankStatus};
pub use registry::RendezvousTimeouts;
pub use session::read_session;

/// The reason why a rank could not join the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// No rendezvous server answers at the addresses.
    #[error(
        "cannot reach the rendezvous at {addresses} within {waited} s ({reason}): is rank 0, or the \
         launcher, running, and is the port open between the machines?"
    )]
    Unreachable {
        /// The addresses of the rendezvous server.
        addresses: String,
        /// The number of seconds that this rank has waited.
        waited: u64,
        /// The error message of the operating system.
        reason: String,
    },
    /// The rendezvous server refused this rank.
    #[error("the rendezvous at {address} refuses this rank: {reason}")]
    Refused {
        /// The address of the rendezvous server.
        address: String,
        /// The reason of the refusal.
        reason: String,
    },
    /// A rank has not joined, or a rank is incompatible with the other ranks.
    #[error("{message}")]
    Failed {
        /// The rank that has failed.
        rank: usize,
        /// A description of the failure.
        message: String,
    },
    /// The rendezvous server cannot listen on an address, or the host has no address.
    #[error("cannot host the rendezvous at {address}: {reason}")]
    Address {
        /// The invalid address.
        address: String,
        /// The error message of the operating system.
        reason: String,
    },
    /// This rank and the rendezvous server have different tokens.
    #[error(
        "token mismatch with the rendezvous at {address}: set the same BURN_MEGATRON_TOKEN, or pass the same \
         --token-file, on all ranks"
    )]
    Token {
        /// The address of the rendezvous server.
        address: String,
    },
    /// The ranks are on several machines but have no token.
    #[error(
        "the ranks are on several machines, which requires the same token on all of them:\n{TOKEN_INSTRUCTIONS}"
    )]
    MissingToken,
    /// The operating system could not start a thread or rejected a connection.
    #[error("cannot join the rendezvous: {0}")]
    System(String),
}

impl From<io::Error> for RendezvousError {
    fn from(error: io::Error) -> Self {
        Self::System(error.to_string())
    }
}

/// Resolves a host and a port to socket addresses.
///
/// # Errors
/// [`RendezvousError::Address`] if the host has no IP address.
pub fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, RendezvousError> {
    let failed = |reason: String| RendezvousError::Address {
        address: format!("{host}:{port}"),
        reason,
    };
    let found = (host, port).to_socket_addrs();
    let found: Vec<_> = found.map_err(|error| failed(error.to_string()))?.collect();
    if found.is_empty() {
        Err(failed("the host has no address".into()))
    } else {
        Ok(found)
    }
}

fn list(addresses: &[SocketAddr]) -> String {
    let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    texts.join(", ")
}

/// Returns the name of this machine, for use in messages.
fn host_name() -> String {
    let name = gethostname::gethostname();
    name.to_string_lossy().into_owned()
}

/// The minimum heartbeat timeout. Each rank sends four heartbeats per second.
pub const MIN_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
