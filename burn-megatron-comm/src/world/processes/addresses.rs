//! The network addresses of the rendezvous server.

use std::env;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::process::Transport;
use crate::world::WorldError;
use burn_megatron_rendezvous::{
    Address, Coordinator, Launch, RendezvousError, RendezvousTimeouts, Token, resolve,
};

/// The environment variable with the addresses of Open MPI's daemon on this machine. These are the addresses of the
/// network interfaces that Open MPI uses.
const DAEMON: &str = "OMPI_MCA_orte_local_daemon_uri";

/// Resolves the socket addresses of a rendezvous server. Without a token, returns only loopback addresses.
///
/// # Errors
/// [`RendezvousError::MissingToken`] if the ranks are on several machines and there is no token.
pub(super) fn rendezvous_addresses(
    address: &Address,
    launch: &Launch,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    if launch.token.is_none() && launch.is_multi_node() {
        return Err(RendezvousError::MissingToken);
    }
    let mut addresses = resolve(&address.host, address.port)?;
    let is_loopback = |address: &SocketAddr| address.ip().is_loopback();
    // Some machines map their own name to a loopback address in /etc/hosts.
    if launch.is_multi_node() && !address.is_loopback() && addresses.iter().all(is_loopback) {
        return Err(RendezvousError::Address {
            address: address.to_string(),
            reason: format!(
                "on this machine it resolves to the loopback address {}: set MASTER_ADDR to a network \
                 address",
                addresses[0].ip()
            ),
        });
    }
    if launch.token.is_none() {
        addresses.retain(is_loopback);
        if addresses.is_empty() {
            addresses.push((Ipv4Addr::LOCALHOST, address.port).into());
        }
    }
    Ok(addresses)
}

/// Hosts the rendezvous on the first address that belongs to this machine.
pub(super) fn host_rendezvous(
    addresses: &[SocketAddr],
    size: usize,
    world_id: u64,
    token: Option<&Token>,
    timeouts: RendezvousTimeouts,
) -> Result<Coordinator, RendezvousError> {
    let mut last = RendezvousError::System("the host has no address".into());
    for address in addresses {
        match Coordinator::listen(&[*address], size, world_id, token, timeouts) {
            Ok(coordinator) => return Ok(coordinator),
            Err(error) => {
                last = RendezvousError::Address {
                    address: address.to_string(),
                    reason: reason(&error),
                };
            }
        }
    }
    Err(last)
}

/// Formats an error of the operating system together with the addresses of this machine.
fn reason(error: &io::Error) -> String {
    let own = own_addresses().unwrap_or_default();
    match error.kind() {
        io::ErrorKind::AddrNotAvailable if !own.is_empty() => {
            let own: Vec<String> = own.iter().map(IpAddr::to_string).collect();
            format!(
                "{error}; expected an address of the machine of rank 0, which has {}",
                own.join(", ")
            )
        }
        _ => error.to_string(),
    }
}

/// The data about the rendezvous that rank 0 broadcasts over MPI.
#[derive(Serialize, Deserialize)]
pub(super) struct SharedRendezvous {
    pub addresses: Vec<SocketAddr>,
    pub number: u64,
    pub token: String,
}

/// Hosts the rendezvous on a free port of rank 0, and creates a token if none is set. Broadcasts the address and the
/// token over the transport.
///
/// Collective: call on all ranks of the world.
pub(super) fn share_rendezvous(
    transport: &dyn Transport,
    launch: &Launch,
    timeouts: RendezvousTimeouts,
) -> Result<(Option<Coordinator>, SharedRendezvous), WorldError> {
    let mut coordinator = None;
    let mut own = None;
    if launch.rank == 0 {
        // The id is unlikely to be used by another run, so ranks cannot join the wrong rendezvous.
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = time.map_or(1, |time| time.as_nanos() as u64) ^ u64::from(process::id());
        let token = launch.token.clone().map_or_else(Token::random, Ok);
        let token = token.map_err(RendezvousError::from)?;
        let ips = if launch.is_multi_node() {
            reachable_addresses().map_err(RendezvousError::from)?
        } else {
            vec![Ipv4Addr::LOCALHOST.into()]
        };
        let free: Vec<_> = ips.iter().map(|ip| SocketAddr::new(*ip, 0)).collect();
        let host = Coordinator::listen(&free, launch.world_size, number, Some(&token), timeouts);
        let host = host.map_err(RendezvousError::from)?;
        let shared = SharedRendezvous {
            addresses: host.addresses().to_vec(),
            number,
            token: token.reveal(),
        };
        let text = serde_json::to_vec(&shared).map_err(io::Error::from);
        own = Some(text.map_err(RendezvousError::from)?);
        coordinator = Some(host);
    }
    let received = transport.share(own.as_deref(), timeouts.join)?;
    let shared = serde_json::from_slice(&received);
    let invalid = |_| RendezvousError::System("invalid rendezvous data from rank 0".into());
    Ok((coordinator, shared.map_err(invalid)?))
}

/// Returns the addresses of this machine that the daemon of Open MPI uses. If they are not known, returns all addresses
/// that are not loopback addresses.
fn reachable_addresses() -> io::Result<Vec<IpAddr>> {
    let own = own_addresses()?;
    let daemon = env::var(DAEMON).unwrap_or_default();
    Ok(in_use(&own, &daemon))
}

/// Returns the addresses in `own` that occur in the URI of a daemon, such as `7.0;tcp://10.0.0.1,10.1.0.1:4711`.
/// Returns all addresses in `own` if none of them occurs.
pub(super) fn in_use(own: &[IpAddr], daemon: &str) -> Vec<IpAddr> {
    let words = daemon.split([';', '/', ',', ':']);
    let named: Vec<IpAddr> = words.filter_map(|word| word.parse().ok()).collect();
    let used: Vec<IpAddr> = own
        .iter()
        .copied()
        .filter(|ip| named.contains(ip))
        .collect();
    if used.is_empty() { own.to_vec() } else { used }
}

/// Returns the IPv4 addresses of this machine that are not loopback addresses.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = if_addrs::get_if_addrs()?;
    let mut ips: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    // IPv6 addresses may need a zone.
    ips.retain(|ip| ip.is_ipv4() && !ip.is_loopback());
    if ips.is_empty() {
        return Err(io::Error::other(
            "this machine has no IPv4 address other than loopback",
        ));
    }
    Ok(ips)
}
