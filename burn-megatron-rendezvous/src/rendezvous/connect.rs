//! The connection of a rank to the rendezvous server, including retries.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use super::RendezvousError;
use super::client::JoinRequest;
use super::message::Hello;
use crate::auth::{HandshakeError, client_handshake};

/// The timeout of one connection attempt to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The timeout of one handshake. The listener closes a connection if too many connections are open.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before all addresses are tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Connects to the first address that answers. Retries after any error, except for a wrong token. The heartbeat timeout
/// is the timeout of reads and writes on the connection.
///
/// # Errors
/// [`RendezvousError`] if the connection fails until the time `until`. For a wrong token, the error is returned
/// immediately.
pub(super) fn connect(
    addresses: &[SocketAddr],
    request: &JoinRequest,
    until: Instant,
) -> Result<(TcpStream, SocketAddr), RendezvousError> {
    loop {
        match connect_any(addresses, request, until) {
            Err(error @ RendezvousError::Token { .. }) => return Err(error),
            // The port may still be in use by another run, or the coordinator may not have started yet.
            Err(_) if Instant::now() < until => thread::sleep(RETRY_INTERVAL),
            result => return result,
        }
    }
}

fn connect_any(
    addresses: &[SocketAddr],
    request: &JoinRequest,
    until: Instant,
) -> Result<(TcpStream, SocketAddr), RendezvousError> {
    let unreachable = |reason: String| RendezvousError::Unreachable {
        addresses: super::list(addresses),
        waited: request.join_timeout.as_secs(),
        reason,
    };
    let mut last = unreachable("no address was given".into());
    for address in addresses {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = CONNECT_TIMEOUT.min(left).max(Duration::from_millis(1));
        let connected = TcpStream::connect_timeout(address, timeout)
            .map_err(HandshakeError::from)
            .and_then(|stream| handshake(stream, request));
        match connected {
            Ok(stream) => return Ok((stream, *address)),
            Err(HandshakeError::Token) => {
                last = RendezvousError::Token {
                    address: address.to_string(),
                };
            }
            // An error about a wrong token is more useful, so it is kept.
            Err(_) if matches!(last, RendezvousError::Token { .. }) => {}
            Err(error) => last = unreachable(error.to_string()),
        }
    }
    Err(last)
}

fn handshake(stream: TcpStream, request: &JoinRequest) -> Result<TcpStream, HandshakeError> {
    stream.set_nodelay(true)?;
    let hello = Hello {
        version: env!("CARGO_PKG_VERSION").into(),
        rank: request.rank,
        size: request.size,
        world: request.world,
        host: super::host_name(),
        process: process::id(),
        join_timeout: request.join_timeout.as_secs_f64(),
        heartbeat_timeout: request.heartbeat_timeout.as_secs_f64(),
    };
    let hello = serde_json::to_string(&hello).map_err(io::Error::from)?;
    let (token, timeout) = (request.token.as_ref(), request.heartbeat_timeout);
    let handshake_timeout = timeout.min(HANDSHAKE_TIMEOUT);
    client_handshake(&stream, token, &hello, handshake_timeout)?;
    // The coordinator sends a heartbeat every second.
    stream.set_read_timeout(Some(timeout))?;
    stream.set_write_timeout(Some(timeout))?;
    Ok(stream)
}

/// Describes the reason why no more data can be read from the connection.
pub(super) fn describe_end(end: io::Result<()>, timeout: Duration) -> String {
    match end {
        Ok(()) => "has closed the connection".into(),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ) =>
        {
            format!("has sent no heartbeat for {} s", timeout.as_secs())
        }
        Err(error) => format!("cannot be read ({error})"),
    }
}
