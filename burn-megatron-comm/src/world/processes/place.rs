//! Where the processes of a world meet.

use std::env;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::auth::Token;
use crate::launch::{Address, Launch};
use crate::process::Transport;
use crate::rendezvous::{Coordinator, Patience, RendezvousError, resolve};
use crate::world::WorldError;

/// Where Open MPI's daemon of this machine listens: over the interfaces that its jobs use.
const DAEMON: &str = "OMPI_MCA_orte_local_daemon_uri";

/// The addresses where the ranks meet at `place`: without a token those of this machine that no other
/// reaches.
///
/// # Errors
/// [`RendezvousError::NoToken`] for ranks of several machines without one.
pub(super) fn meeting_place(
    place: &Address,
    launch: &Launch,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    if launch.token.is_none() && launch.is_spread() {
        return Err(RendezvousError::NoToken);
    }
    let mut addresses = resolve(&place.host, place.port)?;
    let is_here_alone = |address: &SocketAddr| address.ip().is_loopback();
    // As where /etc/hosts gives a machine such an address for its own name.
    if launch.is_spread() && !place.is_loopback() && addresses.iter().all(is_here_alone) {
        return Err(RendezvousError::Address {
            address: place.to_string(),
            reason: format!(
                "on this machine it is {}, which no other reaches; give an address of the network in its \
                 place (MASTER_ADDR)",
                addresses[0].ip()
            ),
        });
    }
    if launch.token.is_none() {
        addresses.retain(is_here_alone);
        if addresses.is_empty() {
            addresses.push((Ipv4Addr::LOCALHOST, place.port).into());
        }
    }
    Ok(addresses)
}

/// Holds the rendezvous at the first of the addresses that is this machine's.
pub(super) fn hold(
    addresses: &[SocketAddr],
    size: usize,
    number: u64,
    token: Option<&Token>,
    patience: Patience,
) -> Result<Coordinator, RendezvousError> {
    let mut last = RendezvousError::System("there is no address".into());
    for address in addresses {
        match Coordinator::listen(&[*address], size, number, token, patience) {
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

/// What the operating system says, and what would fit.
fn reason(error: &io::Error) -> String {
    let own = own_addresses().unwrap_or_default();
    match error.kind() {
        io::ErrorKind::AddrNotAvailable if !own.is_empty() => {
            let own: Vec<String> = own.iter().map(IpAddr::to_string).collect();
            format!(
                "{error}; rank 0 runs on this machine, whose addresses are {}",
                own.join(", ")
            )
        }
        _ => error.to_string(),
    }
}

/// Where the ranks meet, as rank 0 tells it to the others through MPI.
#[derive(Serialize, Deserialize)]
pub(super) struct Ticket {
    pub addresses: Vec<SocketAddr>,
    pub number: u64,
    pub token: String,
}

/// Rank 0 holds the rendezvous on a free port, makes a token if it was given none, and tells the others by the engine's own
/// means.
pub(super) fn share(
    transport: &dyn Transport,
    launch: &Launch,
    patience: Patience,
) -> Result<(Option<Coordinator>, Ticket), WorldError> {
    let system = |error: String| WorldError::from(RendezvousError::System(error));
    let mut coordinator = None;
    let mut own = None;
    if launch.rank == 0 {
        // A number that no other run has by chance, so that nobody enters the wrong rendezvous.
        let time = SystemTime::now().duration_since(UNIX_EPOCH);
        let number = time.map_or(1, |time| time.as_nanos() as u64) ^ u64::from(process::id());
        let token = launch.token.clone().map_or_else(Token::random, Ok);
        let token = token.map_err(|error| system(error.to_string()))?;
        let ips = if launch.is_spread() {
            reached_by_others().map_err(|error| system(error.to_string()))?
        } else {
            vec![Ipv4Addr::LOCALHOST.into()]
        };
        let free: Vec<_> = ips.iter().map(|ip| SocketAddr::new(*ip, 0)).collect();
        let held = Coordinator::listen(&free, launch.world_size, number, Some(&token), patience);
        let held = held.map_err(|error| system(error.to_string()))?;
        let ticket = Ticket {
            addresses: held.addresses().to_vec(),
            number,
            token: token.reveal(),
        };
        own = Some(serde_json::to_vec(&ticket).map_err(|error| system(error.to_string()))?);
        coordinator = Some(held);
    }
    let shared = transport.share(own.as_deref(), patience.gather);
    let shared = shared.map_err(WorldError::Engine)?;
    let ticket = serde_json::from_slice(&shared);
    let ticket = ticket.map_err(|_| system("what rank 0 told is no meeting place".into()))?;
    Ok((coordinator, ticket))
}

/// The addresses of this machine over which MPI's own daemon talks to the others, or, where it does not
/// say, all that others may reach.
fn reached_by_others() -> io::Result<Vec<IpAddr>> {
    let own = own_addresses()?;
    let daemon = env::var(DAEMON).unwrap_or_default();
    Ok(in_use(&own, &daemon))
}

/// Those of `own` that stand in the address of a daemon, such as `7.0;tcp://10.0.0.1,10.1.0.1:4711`; all
/// if none does.
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

/// The addresses of this machine at which others may reach it.
fn own_addresses() -> io::Result<Vec<IpAddr>> {
    let interfaces = if_addrs::get_if_addrs()?;
    let mut ips: Vec<IpAddr> = interfaces.iter().map(if_addrs::Interface::ip).collect();
    // What is IPv6 may need the name of its interface besides.
    ips.retain(|ip| ip.is_ipv4() && !ip.is_loopback());
    if ips.is_empty() {
        return Err(io::Error::other(
            "this machine has no IPv4 address that others could reach",
        ));
    }
    Ok(ips)
}
