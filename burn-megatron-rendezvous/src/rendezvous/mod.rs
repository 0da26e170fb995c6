//! The rendezvous of the processes of a world, which also detects failed ranks.
//!
//! No tensor passes it. It reports when all ranks have joined, stores small values (the addresses of an
//! engine), collects heartbeats with the position of each rank, and sends one failure report to all ranks.
//! There is one [`Coordinator`] per world and one TCP connection per rank, which begins with a handshake that
//! proves that both sides know the [token](crate::auth); then one line of JSON per message.

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

/// Why a rank could not join the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// No rendezvous answers at the addresses.
    #[error(
        "cannot reach the rendezvous at {addresses} within {waited} s ({reason}): is rank 0, or the \
         launcher, running, and is the port open between the machines?"
    )]
    Unreachable {
        /// The addresses.
        addresses: String,
        /// The seconds waited.
        waited: u64,
        /// The message of the operating system.
        reason: String,
    },
    /// The rendezvous refuses this rank.
    #[error("the rendezvous at {address} refuses this rank: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// A rank did not join, or is incompatible with the others.
    #[error("{message}")]
    Failed {
        /// The rank that failed.
        rank: usize,
        /// A description of the failure.
        message: String,
    },
    /// The rendezvous cannot listen on its address.
    #[error("cannot host the rendezvous at {address}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// The message of the operating system.
        reason: String,
    },
    /// The tokens of rank and rendezvous differ.
    #[error(
        "token mismatch with the rendezvous at {address}: set the same BURN_MEGATRON_TOKEN, or pass the same \
         --token-file, on all ranks"
    )]
    Token {
        /// The address.
        address: String,
    },
    /// Ranks on several machines have no token.
    #[error(
        "the ranks are on several machines, which requires the same token on all of them:\n{TOKEN_INSTRUCTIONS}"
    )]
    MissingToken,
    /// The operating system refuses a thread or a connection.
    #[error("cannot join the rendezvous: {0}")]
    System(String),
}

impl From<io::Error> for RendezvousError {
    fn from(error: io::Error) -> Self {
        Self::System(error.to_string())
    }
}

/// The addresses of a host and port.
///
/// # Errors
/// [`RendezvousError::Address`] if it has none.
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

/// The name of this machine, for messages.
fn host_name() -> String {
    let name = gethostname::gethostname();
    name.to_string_lossy().into_owned()
}

/// The least timeout for heartbeats, of which a rank sends four per second.
pub const MIN_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);
