//! The plan of a launch, checked before anything is started.

use std::env;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;

use burn_megatron::comm::Token;

use super::args::{LaunchArgs, LaunchEngine, MAX_RANKS};
use super::error::LaunchError;
use super::{mpirun, program};

/// Variables that only exist in the process of a rank.
const RANK_VARIABLES: [&str; 3] = ["RANK", "BURN_MEGATRON_RENDEZVOUS", "OMPI_COMM_WORLD_RANK"];

/// Launch that can be started.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// The program of each rank and its arguments.
    pub command: Vec<OsString>,
    /// The number of ranks.
    pub ranks: usize,
    /// The program that starts the ranks.
    pub starter: Starter,
    /// The token that authenticates the ranks.
    pub token: Token,
}

/// Program that starts the ranks.
#[derive(Clone, Debug)]
pub enum Starter {
    /// This process starts the ranks directly.
    Spawn {
        /// The port of the rendezvous, or 0 for any free port.
        port: u16,
    },
    /// This process starts the ranks with the variables of mpirun.
    Mpirun {
        /// The path of Open MPI's mpirun.
        mpirun: PathBuf,
        /// Additional arguments for mpirun.
        arguments: Vec<String>,
    },
}

impl LaunchPlan {
    /// Creates the plan for `args`. `variable` reads the environment.
    pub fn new(
        args: &LaunchArgs,
        variable: &dyn Fn(&str) -> Option<OsString>,
    ) -> Result<Self, LaunchError> {
        let mut of_rank = RANK_VARIABLES.iter();
        if let Some((variable, value)) = of_rank.find_map(|name| Some((name, variable(name)?))) {
            let value = value.to_string_lossy().into_owned();
            return Err(LaunchError::Nested { variable, value });
        }
        let engine = args.engine.unwrap_or_else(|| default_engine(&args.command));
        check_flags(args, engine)?;
        let starter = match engine {
            LaunchEngine::Threads => return Err(LaunchError::Threads),
            LaunchEngine::Nccl => spawn_starter(args)?,
            LaunchEngine::Mpi => mpirun_starter(args)?,
        };
        Ok(Self {
            command: command(args)?,
            ranks: args.ranks,
            starter,
            token: token(args, variable)?,
        })
    }

    /// Returns the name of the communication engine.
    pub fn engine(&self) -> &'static str {
        match self.starter {
            Starter::Spawn { .. } => "nccl",
            Starter::Mpirun { .. } => "mpi",
        }
    }
}

/// Returns the given token, or a new token.
fn token(
    args: &LaunchArgs,
    variable: &dyn Fn(&str) -> Option<OsString>,
) -> Result<Token, LaunchError> {
    let told = variable(Token::VARIABLE);
    let told = told.map(|told| Token::parse(&told.to_string_lossy(), Token::VARIABLE));
    match (&args.token_file, told.transpose()?) {
        (Some(path), told) => Ok(Token::from_file_matching(path, told.as_ref())?),
        (None, Some(told)) => Ok(told),
        (None, None) => Token::random().map_err(LaunchError::system("no token can be generated")),
    }
}

/// Returns NCCL if the command has `--device cuda`, else MPI.
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
    match args.ranks {
        _ if engine == LaunchEngine::Threads => return Err(LaunchError::Threads),
        0 => return Err(LaunchError::NoRanks),
        ranks if ranks > MAX_RANKS => return Err(LaunchError::TooManyRanks(ranks)),
        _ => {}
    }
    if args.max_restarts == 0 && args.restart_delay.is_some() {
        return Err(LaunchError::DelayWithoutRestarts);
    }
    let of_nccl = [("--master-port", args.master_port.is_some())];
    let of_mpi = [
        ("--mpirun", args.mpirun.is_some()),
        ("--mpirun-args", args.mpirun_args.is_some()),
    ];
    // The flags that belong to the other engine.
    let (flags, engine, chosen) = match engine {
        LaunchEngine::Mpi => (&of_nccl[..], "nccl", "mpi"),
        _ => (&of_mpi[..], "mpi", "nccl"),
    };
    match flags.iter().find(|(_, is_given)| *is_given) {
        None => Ok(()),
        Some((flag, _)) => Err(LaunchError::WrongEngine {
            flag,
            engine,
            chosen,
        }),
    }
}

fn spawn_starter(args: &LaunchArgs) -> Result<Starter, LaunchError> {
    let port = args.master_port.unwrap_or(0);
    // The port is checked here too, before the output folder is created.
    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    bound.map_err(|source| LaunchError::PortTaken { port, source })?;
    Ok(Starter::Spawn { port })
}

fn mpirun_starter(args: &LaunchArgs) -> Result<Starter, LaunchError> {
    let arguments = args.mpirun_args.as_deref().map(mpirun::words).transpose()?;
    Ok(Starter::Mpirun {
        mpirun: mpirun::find(args.mpirun.as_deref())?,
        arguments: arguments.unwrap_or_default(),
    })
}

/// Returns the program of each rank and its arguments.
fn command(args: &LaunchArgs) -> Result<Vec<OsString>, LaunchError> {
    let program = match &args.program {
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
