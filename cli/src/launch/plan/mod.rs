//! The plan of a launch, checked before anything is started.

use std::env;
use std::ffi::OsString;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::PathBuf;

use burn_megatron::comm::Token;

use super::args::{LaunchArgs, LaunchEngine};
use super::error::{LaunchError, MAX_LOCAL_RANKS};
use super::{mpirun, program};

/// Variables that only the process of a rank has.
const RANK_VARIABLES: [&str; 3] = ["RANK", "BURN_MEGATRON_RENDEZVOUS", "OMPI_COMM_WORLD_RANK"];

/// The default port of the rendezvous with several machines, torchrun's.
const DEFAULT_MASTER_PORT: u16 = 29500;

/// A launch that can be started.
#[derive(Debug)]
pub struct LaunchPlan {
    /// The program of each rank and its arguments.
    pub command: Vec<OsString>,
    /// The first rank started by this launcher.
    pub first: usize,
    /// The number of ranks started by this launcher.
    pub ranks: usize,
    /// The number of ranks on all machines.
    pub world: usize,
    /// What starts the agents.
    pub starter: Starter,
    /// What ranks and agents authenticate with.
    pub token: Token,
}

/// What starts the agents of the ranks.
#[derive(Debug)]
pub enum Starter {
    /// This process, as its children.
    Spawn {
        /// The host of the rendezvous.
        host: String,
        /// The port of the rendezvous; 0 for any free one.
        port: u16,
    },
    /// mpirun.
    Mpirun {
        /// Open MPI's mpirun.
        mpirun: PathBuf,
        /// The hosts, if there are several.
        hosts: Option<String>,
        /// Further arguments.
        arguments: Vec<String>,
        /// The address of this machine as other hosts reach it.
        host: String,
    },
}

impl LaunchPlan {
    /// The plan that `args` ask for; `variable` reads the environment.
    pub fn new(
        args: &LaunchArgs,
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
        for name in RANK_VARIABLES {
            if let Some(value) = variable(name) {
                let value = value.to_string_lossy().into_owned();
                return Err(LaunchError::Nested {
                    variable: name,
                    value,
                });
            }
        }
        let engine = args.engine.unwrap_or_else(|| default_engine(&args.command));
        check_flags(args, engine)?;
        let starter = match engine {
            LaunchEngine::Threads => return Err(LaunchError::Threads),
            LaunchEngine::Nccl => spawn_starter(args)?,
            LaunchEngine::Mpi => mpirun_starter(args)?,
        };
        let too_many = LaunchError::TooManyNodes {
            nodes: args.nodes,
            ranks: args.ranks,
        };
        let world = args.nodes.checked_mul(args.ranks);
        let world = world.filter(|world| *world <= 1 << 24).ok_or(too_many)?;
        if let Starter::Spawn {
            host,
            port: port @ 1..,
        } = &starter
            && args.node_rank == 0
        {
            listening_address(host, *port)?;
        }
        Ok(Self {
            command: command(args)?,
            first: args.node_rank * args.ranks,
            ranks: args.ranks,
            world,
            starter,
            token: token(args, variable)?,
        })
    }
}

/// The token that was given, or a new one where all ranks are started from here.
fn token(
    args: &LaunchArgs,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Token, LaunchError> {
    let told = variable(Token::VARIABLE);
    let told = told.map(|told| Token::parse(&told.to_string_lossy(), Token::VARIABLE));
    match (&args.token_file, told.transpose()?) {
        (Some(path), told) => Ok(Token::from_file_matching(path, told.as_ref())?),
        (None, Some(told)) => Ok(told),
        (None, None) if args.nodes > 1 => Err(LaunchError::NoToken(args.nodes)),
        (None, None) => Token::random().map_err(LaunchError::system("no token can be generated")),
    }
}

/// NCCL where the command has `--device cuda`, else MPI.
fn default_engine(command: &[OsString]) -> LaunchEngine {
    let pairs = command.windows(2);
    let is_cuda = command.iter().any(|word| word == "--device=cuda")
        || pairs.into_iter().any(|pair| pair == ["--device", "cuda"]);
    if is_cuda {
        LaunchEngine::Nccl
    } else {
        LaunchEngine::Mpi
    }
}

fn check_flags(args: &LaunchArgs, engine: LaunchEngine) -> Result<(), LaunchError> {
    let mpi = engine == LaunchEngine::Mpi;
    let (own, other) = if mpi {
        ("mpi", "nccl")
    } else {
        ("nccl", "mpi")
    };
    let (hosts_hint, none) = ("; with mpi, --hosts starts several machines", "");
    // A flag, whether it is given, and whether it belongs to the engine mpi.
    let flags = [
        ("--nodes", args.nodes != 1, false, hosts_hint),
        ("--node-rank", args.node_rank != 0, false, hosts_hint),
        ("--master-port", args.master_port.is_some(), false, none),
        (
            "--hosts",
            args.hosts.is_some(),
            true,
            "; with nccl, --nodes and --node-rank start several machines",
        ),
        ("--mpirun", args.mpirun.is_some(), true, none),
        ("--mpirun-args", args.mpirun_args.is_some(), true, none),
    ];
    match args.ranks {
        _ if engine == LaunchEngine::Threads => return Err(LaunchError::Threads),
        0 => return Err(LaunchError::NoRanks),
        // With several hosts, not all of mpirun's ranks are on this machine.
        ranks if ranks > MAX_LOCAL_RANKS && args.hosts.is_none() => {
            return Err(LaunchError::TooManyRanks(ranks));
        }
        _ => {}
    }
    for (flag, is_given, is_mpi, hint) in flags {
        if is_given && is_mpi != mpi {
            return Err(LaunchError::WrongEngine {
                flag,
                engine: other,
                chosen: own,
                hint,
            });
        }
    }
    if let Some(host) = &args.master_addr {
        if mpi && args.hosts.is_none() {
            return Err(LaunchError::MasterWithoutHosts);
        }
        let is_host = |c: char| c.is_alphanumeric() || "-_.".contains(c);
        let is_v6 = host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_ipv6());
        if host.is_empty() || !(is_v6 || host.chars().all(is_host)) {
            return Err(LaunchError::MasterAddress(host.clone()));
        }
    }
    Ok(())
}

fn spawn_starter(args: &LaunchArgs) -> Result<Starter, LaunchError> {
    let (nodes, node_rank) = (args.nodes, args.node_rank);
    match (nodes, node_rank, &args.master_addr) {
        (0, _, _) => return Err(LaunchError::NoNodes),
        _ if node_rank >= nodes => return Err(LaunchError::NodeRank { node_rank, nodes }),
        (2.., _, None) => return Err(LaunchError::NoMasterAddress(nodes)),
        _ => {}
    }
    let port = match (args.master_port, nodes) {
        (Some(port), _) => port,
        (None, 1) => 0,
        (None, _) => DEFAULT_MASTER_PORT,
    };
    let host = args.master_addr.clone();
    let host = host.unwrap_or_else(|| Ipv4Addr::LOCALHOST.to_string());
    Ok(Starter::Spawn { host, port })
}

/// A free port of this machine.
pub fn free_port() -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// The first address of `host` at which this machine can listen, on `port` or, if it is 0, on any port.
pub fn listening_address(host: &str, port: u16) -> Result<SocketAddr, LaunchError> {
    let not_here = |source| LaunchError::NotHere {
        host: host.to_owned(),
        source,
    };
    let mut last = not_here(io::ErrorKind::NotFound.into());
    for address in (host, port).to_socket_addrs().map_err(not_here)? {
        match TcpListener::bind(address) {
            Ok(_) => return Ok(address),
            Err(source) if source.kind() == io::ErrorKind::AddrNotAvailable => {
                last = not_here(source);
            }
            Err(source) => last = LaunchError::PortTaken { port, source },
        }
    }
    Err(last)
}

/// `host:port`, with the brackets that an IPv6 address needs.
pub fn address(host: &str, port: u16) -> String {
    if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    }
}

fn mpirun_starter(args: &LaunchArgs) -> Result<Starter, LaunchError> {
    let hosts = args
        .hosts
        .as_deref()
        .map(|hosts| mpirun::names(hosts).map(|names| (hosts, names)));
    let hosts = hosts.transpose()?;
    let host = match (&args.master_addr, &hosts) {
        (Some(host), _) => host.clone(),
        (None, Some((_, names))) => local_address_towards(names),
        (None, None) => Ipv4Addr::LOCALHOST.to_string(),
    };
    let arguments = args.mpirun_args.as_deref().map(mpirun::words).transpose()?;
    Ok(Starter::Mpirun {
        mpirun: mpirun::find(args.mpirun.as_deref())?,
        hosts: hosts.map(|(hosts, _)| hosts.to_owned()),
        arguments: arguments.unwrap_or_default(),
        host,
    })
}

/// The address of this machine on the route to the first of `names` that is another machine.
fn local_address_towards(names: &[&str]) -> String {
    let own_address = |name: &&str| {
        // Connecting a UDP socket looks up the route and sends nothing.
        let to = (*name, 9)
            .to_socket_addrs()
            .ok()?
            .find(SocketAddr::is_ipv4)?;
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect(to).ok()?;
        let own = socket.local_addr().ok()?.ip();
        (own != to.ip() && !own.is_loopback()).then_some(own)
    };
    let found = names.iter().find_map(own_address);
    found.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)).to_string()
}

/// The program of each rank and its arguments.
fn command(args: &LaunchArgs) -> Result<Vec<OsString>, LaunchError> {
    let program = match &args.program {
        // It may exist on the other hosts only.
        Some(program) if args.hosts.is_some() => program.clone(),
        Some(program) => program::find(program)?,
        None => env::current_exe().map_err(LaunchError::system(
            "the path of this program cannot be found",
        ))?,
    };
    let words = std::iter::once(program.into_os_string());
    Ok(words.chain(args.command.iter().cloned()).collect())
}

#[cfg(test)]
mod tests;
