//! Where the processes of a world meet.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::comm::process::Transport;
use crate::comm::rendezvous::{Coordinator, Patience, RendezvousError};
use crate::comm::world::WorldError;

/// Holds the rendezvous at one of the addresses, which then lead there.
pub(super) fn hold(
    addresses: &mut [SocketAddr],
    size: usize,
    number: u64,
    patience: Patience,
) -> Result<Coordinator, RendezvousError> {
    let mut last = None;
    for address in addresses.iter_mut() {
        let mut listens = *address;
        if !listens.ip().is_loopback() {
            // The name may stand for an address that only the others know this machine by.
            listens.set_ip(match listens {
                SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            });
        }
        match Coordinator::listen(listens, size, number, patience) {
            Ok(coordinator) => {
                address.set_port(coordinator.address().port());
                return Ok(coordinator);
            }
            Err(error) => {
                last = Some(RendezvousError::Address {
                    address: address.to_string(),
                    reason: error.to_string(),
                });
            }
        }
    }
    Err(last.unwrap_or(RendezvousError::System("there is no address".into())))
}

/// Where the ranks meet, as rank 0 tells it to the others.
#[derive(Serialize, Deserialize)]
pub(super) struct Ticket {
    pub addresses: Vec<SocketAddr>,
    pub number: u64,
}

/// Rank 0 holds the rendezvous on a free port, and tells the others by the engine's own means.
pub(super) fn share(
    transport: &dyn Transport,
    rank: usize,
    size: usize,
    local: bool,
    patience: Patience,
) -> Result<(Option<Coordinator>, Ticket), WorldError> {
    let system = |error: String| WorldError::from(RendezvousError::System(error));
    let mut coordinator = None;
    let mut own = None;
    if rank == 0 {
        // A number that no other run has by chance, so that nobody enters the wrong rendezvous.
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = time.map_or(1, |time| time.as_nanos() as u64) ^ u64::from(process::id());
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let listens = match local {
            true => SocketAddr::new(loopback, 0),
            false => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        };
        let held = hold(&mut [listens], size, number, patience)?;
        let port = held.address().port();
        let ips = match local {
            true => vec![loopback],
            false => own_addresses().map_err(|error| system(error.to_string()))?,
        };
        let addresses = ips
            .into_iter()
            .map(|ip| SocketAddr::new(ip, port))
            .collect();
        let ticket = Ticket { addresses, number };
        own = Some(serde_json::to_vec(&ticket).map_err(|error| system(error.to_string()))?);
        coordinator = Some(held);
    }
    let shared = transport.share(own.as_deref(), patience.gather);
    let shared = shared.map_err(WorldError::Engine)?;
    let ticket = serde_json::from_slice(&shared).map_err(|error| system(error.to_string()))?;
    Ok((coordinator, ticket))
}

/// The addresses of this machine at which others may reach it, the likelier ones first.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = if_addrs::get_if_addrs()?;
    let mut ips: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    // The rendezvous listens on IPv4.
    ips.retain(IpAddr::is_ipv4);
    ips.sort_by_key(IpAddr::is_loopback);
    Ok(ips)
}
