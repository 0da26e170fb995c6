//! Where the processes of a world find each other, and learn of each other's ends.
//!
//! Nothing of the model goes this way: a rank is told that all have come, small values are handed round
//! (the address book of an engine), each rank says now and then that it lives and where it stands, and
//! the first failure is told to all, with a verdict. One [`Coordinator`] per world, a TCP connection per
//! rank, which begins with a proof that both sides know the [token](super::auth), then one line of JSON per
//! message.

mod coordinator;
mod member;
mod message;
mod registry;
mod seat;
mod session;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use super::auth::MAKE_A_TOKEN;
pub use coordinator::Coordinator;
pub(crate) use member::{Introduction, Member, Witness};
pub(crate) use message::{CallOf, Cause, CauseKind, Failure, Stand};
pub(crate) use registry::Patience;
pub use session::read_session;

/// Why the ranks did not find each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Nobody answers there.
    #[error(
        "the rendezvous at {addresses} cannot be reached within {waited} s ({reason}); is rank 0, or \
         the launcher, running, and is the port open between the machines?"
    )]
    Unreachable {
        /// The addresses that were tried.
        addresses: String,
        /// How many seconds long.
        waited: u64,
        /// What the operating system says.
        reason: String,
    },
    /// The rendezvous does not let this rank in.
    #[error("the rendezvous at {address} refuses this rank: {reason}")]
    Refused {
        /// The address.
        address: String,
        /// Why.
        reason: String,
    },
    /// Some ranks did not come, or do not fit the others.
    #[error("{message}")]
    Failed {
        /// The rank that did not come, or does not fit.
        rank: usize,
        /// What is wrong.
        message: String,
    },
    /// The rendezvous cannot be held at its address.
    #[error("the rendezvous cannot be held at {address}: {reason}")]
    Address {
        /// The address.
        address: String,
        /// What the operating system says.
        reason: String,
    },
    /// Two processes with different tokens.
    #[error(
        "the rendezvous at {address} has another token than this rank; give all ranks the same \
         BURN_MEGATRON_TOKEN, or the same file by --token-file"
    )]
    Token {
        /// The address.
        address: String,
    },
    /// Ranks of several machines without a token.
    #[error(
        "the ranks are on several machines, and nothing says who may join them; give all of them one \
         token:\n{MAKE_A_TOKEN}"
    )]
    NoToken,
    /// The operating system refuses a thread or a connection.
    #[error("the rendezvous cannot be entered: {0}")]
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
/// [`RendezvousError::Address`] if the host has none.
pub(crate) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>, RendezvousError> {
    let failed = |reason: String| RendezvousError::Address {
        address: format!("{host}:{port}"),
        reason,
    };
    let found = (host, port).to_socket_addrs();
    let found: Vec<_> = found.map_err(|error| failed(error.to_string()))?.collect();
    match found.is_empty() {
        true => Err(failed("the host has no address".into())),
        false => Ok(found),
    }
}

fn list(addresses: &[SocketAddr]) -> String {
    let texts: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
    texts.join(", ")
}

/// What the connections of ranks are for: see [`introduce`](super::auth::introduce).
const PURPOSE: &str = "rendezvous";

/// The name of this machine, for messages.
fn host_name() -> String {
    let name = gethostname::gethostname();
    name.to_string_lossy().into_owned()
}

/// The least patience for a sign of life: ranks give one four times a second.
pub(crate) const LEAST_SILENCE: Duration = Duration::from_secs(1);
