//! Why the ranks were not started.

use std::io;
use std::path::PathBuf;

use burn_megatron::comm::auth::{MAKE_A_TOKEN, TokenError};

/// The exit code for wrong usage, as clap has it.
const USAGE: u8 = 2;
/// The exit code for a program that cannot be started, as shells have it.
pub const UNSTARTABLE: u8 = 127;

/// The most ranks on one machine.
pub const MAX_LOCAL_RANKS: usize = 1024;

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("--ranks 0 starts nothing; give at least 1")]
    NoRanks,
    #[error(
        "--ranks {0} is more than one machine can have; at most {MAX_LOCAL_RANKS} can be started"
    )]
    TooManyRanks(usize),
    #[error(
        "--engine threads needs no launcher: its ranks are threads of one process; leave `launch --ranks \
         N --` out and set the sizes, as in `burn-megatron pretrain --tensor-parallel 2`"
    )]
    Threads,
    #[error(
        "{variable}={value} is set: this process is a rank itself, and a rank starts no ranks; run \
         `launch` outside of it, or unset {variable}"
    )]
    Nested {
        variable: &'static str,
        value: String,
    },
    #[error(
        "{flag} is about --engine {engine}, and this run has --engine {chosen}; leave it out{hint}"
    )]
    WrongEngine {
        flag: &'static str,
        engine: &'static str,
        chosen: &'static str,
        hint: &'static str,
    },
    #[error("--nodes 0 starts nothing; give at least 1")]
    NoNodes,
    #[error("--nodes {nodes} x --ranks {ranks} are more ranks than can be counted")]
    TooManyNodes { nodes: usize, ranks: usize },
    #[error(
        "--node-rank {node_rank} is no machine of --nodes {nodes}; 0 to {} are",
        nodes.saturating_sub(1)
    )]
    NodeRank { node_rank: usize, nodes: usize },
    #[error(
        "--nodes {0} needs --master-addr: the machine of --node-rank 0, as the others reach it"
    )]
    NoMasterAddress(usize),
    #[error(
        "--master-addr is about several machines, and --engine mpi has them by --hosts; give that, or leave it out"
    )]
    MasterWithoutHosts,
    #[error("--master-addr {0:?} is no host; a name or an IP address without a port is")]
    MasterAddress(String),
    #[error(
        "the master port {port} is not free on this machine: {source}; choose another with --master-port"
    )]
    PortTaken { port: u16, source: io::Error },
    #[error(
        "--master-addr {host} is no address of this machine ({source}), where the ranks are to meet; give one \
         that `ip address` shows here"
    )]
    NotHere { host: String, source: io::Error },
    #[error(
        "--nodes {0} needs a token, the same on each machine, so that nobody else joins the ranks:\n{MAKE_A_TOKEN}"
    )]
    NoToken(usize),
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("--hosts {hosts:?}: {entry:?} is no host; name or name:ranks is, as in a:2,b:2")]
    Host { hosts: String, entry: String },
    #[error("--mpirun-args {0:?}: a quote is not closed")]
    Quote(String),
    #[error(
        "mpirun was not found on PATH; install it (Debian, Ubuntu: apt-get install openmpi-bin; Fedora: \
         dnf install openmpi), or name it with --mpirun PATH"
    )]
    NoMpirun,
    #[error("{} is not Open MPI's mpirun: {said}; name one with --mpirun PATH", path.display())]
    OtherMpirun { path: PathBuf, said: String },
    #[error("the program {} cannot be started: {reason}", program.display())]
    Program { program: PathBuf, reason: String },
    #[error("the output folder {} cannot be used: {source}", path.display())]
    OutputFolder { path: PathBuf, source: io::Error },
    #[error("{what}: {source}")]
    System {
        what: &'static str,
        source: io::Error,
    },
}

impl LaunchError {
    /// The exit code that tells of it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program { .. } | Self::NoMpirun | Self::OtherMpirun { .. } => UNSTARTABLE,
            Self::OutputFolder { .. } | Self::System { .. } => 1,
            _ => USAGE,
        }
    }

    /// Says what was to be done when the system refused.
    pub fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
