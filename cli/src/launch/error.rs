//! Why the ranks were not started.

use std::io;
use std::path::PathBuf;

use burn_megatron::comm::auth::{TOKEN_INSTRUCTIONS, TokenError};

/// The exit code of wrong usage, as with clap.
const USAGE: u8 = 2;
/// The exit code when a program cannot be started, as in a shell.
pub const NOT_STARTED: u8 = 127;

/// The most ranks on one machine.
pub const MAX_LOCAL_RANKS: usize = 1024;

/// Why nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("invalid --ranks 0: expected at least 1")]
    NoRanks,
    #[error("invalid --ranks {0}: expected at most {MAX_LOCAL_RANKS} on one machine")]
    TooManyRanks(usize),
    #[error(
        "--engine threads needs no launcher: its ranks are threads of one process; leave `launch --ranks \
         N --` out and set the sizes, as in `burn-megatron pretrain --tensor-parallel 2`"
    )]
    Threads,
    #[error(
        "{variable}={value} is set: this process is a rank already, and a rank cannot start ranks; run \
         `launch` outside of it, or unset {variable}"
    )]
    Nested {
        variable: &'static str,
        value: String,
    },
    #[error(
        "{flag} applies to --engine {engine} only, and this run has --engine {chosen}; remove it{hint}"
    )]
    WrongEngine {
        flag: &'static str,
        engine: &'static str,
        chosen: &'static str,
        hint: &'static str,
    },
    #[error("invalid --nodes 0: expected at least 1")]
    NoNodes,
    #[error("--nodes {nodes} x --ranks {ranks} are too many ranks: expected at most 16777216")]
    TooManyNodes { nodes: usize, ranks: usize },
    #[error(
        "invalid --node-rank {node_rank} with --nodes {nodes}: expected 0 to {}",
        nodes.saturating_sub(1)
    )]
    NodeRank { node_rank: usize, nodes: usize },
    #[error(
        "--nodes {0} needs --master-addr: the host of --node-rank 0, as the other machines reach it"
    )]
    NoMasterAddress(usize),
    #[error(
        "--master-addr applies to several machines, which --engine mpi gets from --hosts; give --hosts, or remove it"
    )]
    MasterWithoutHosts,
    #[error("invalid --master-addr {0:?}: expected a host name or an IP address, without a port")]
    MasterAddress(String),
    #[error(
        "the master port {port} is not free on this machine: {source}; choose another with --master-port"
    )]
    PortTaken { port: u16, source: io::Error },
    #[error(
        "--master-addr {host} is not an address of this machine ({source}), which hosts the rendezvous; give one \
         that `ip address` lists here"
    )]
    NotHere { host: String, source: io::Error },
    #[error(
        "--nodes {0} needs a token, the same on each machine, so that no other process can join:\n{TOKEN_INSTRUCTIONS}"
    )]
    NoToken(usize),
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error("invalid --hosts {hosts:?}: {entry:?}: expected name or name:ranks, as in a:2,b:2")]
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
    /// The exit code of the launcher.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program { .. } | Self::NoMpirun | Self::OtherMpirun { .. } => NOT_STARTED,
            Self::OutputFolder { .. } | Self::System { .. } => 1,
            _ => USAGE,
        }
    }

    /// A failed system call, and what it was for.
    pub fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
