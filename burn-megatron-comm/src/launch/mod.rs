//! How this process was started: its rank, from the variables of the launcher.
//!
//! | launcher | what it is known by | rank, size, local rank, local size |
//! |---|---|---|
//! | torchrun | `TORCHELASTIC_RUN_ID` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
//! | `burn-megatron launch` | `BURN_MEGATRON_RENDEZVOUS` and `RANK` | the same |
//! | OpenMPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | `srun` | `SLURM_STEP_ID` of a step | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
//! | `srun --mpi=pmix` | the same, and `PMIX_RANK` | the same; `PMIX_RANK` must agree |
//! | by hand | `RANK` or `WORLD_SIZE` | the same as torchrun; the local ones may be left out where all ranks are on one machine |
//!
//! The first line of the table that fits is taken. It has the launchers that start processes within
//! a task of another one first: one torchrun for each node under `srun` or `mpirun`, and `mpirun` within
//! a Slurm job, whose variables describe the allocation. Their numbers rightly differ from those of the
//! launcher around them. Variables set *by hand* beside OpenMPI's or Slurm's must say the same.
//!
//! **Slurm's batch scripts and shells are no ranks.** `sbatch` and `salloc` set `SLURM_PROCID=0` and
//! `SLURM_NTASKS` for the script or shell too, which nothing but `SLURM_STEP_ID` tells from a task: it
//! is not set in the script, and in the shell of `salloc` it is one of those above 4294967280, which
//! Slurm keeps for itself.
//!
//! # The rendezvous
//!
//! Where the ranks meet, from the first of these that is set:
//!
//! - `BURN_MEGATRON_RENDEZVOUS=host:port`;
//! - host: `MASTER_ADDR`; the first host of `SLURM_STEP_NODELIST`, or of `SLURM_JOB_NODELIST`;
//!   `127.0.0.1` under OpenMPI where all ranks are on one machine; else there is none;
//! - port: `BURN_MEGATRON_PORT`; `MASTER_PORT`, and under torchrun with
//!   `TORCHELASTIC_USE_AGENT_STORE=True` the port above it, as the agent listens on `MASTER_PORT` itself;
//!   15000 + (`SLURM_JOB_ID` + 997 `SLURM_STEP_ID`) mod 10000; 15000 + (64-bit FNV-1a of
//!   `PMIX_NAMESPACE`, OpenMPI's name of the job) mod 10000.
//!
//! Who may join is said by the [token](super::auth) of `BURN_MEGATRON_TOKEN`.

mod address;
mod error;
mod node_list;
mod rendezvous;
mod seat;
mod slurm;
mod vars;

use std::env;
use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::auth::{Token, TokenError};
pub use address::{Address, AddressError};
pub use error::LaunchError;
pub use node_list::NodeListError;
use seat::{Seat, agree};
use vars::{Variable, Vars};

/// What started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Launcher {
    /// PyTorch's torchrun.
    Torchrun,
    /// Slurm's `srun`.
    Slurm,
    /// OpenMPI's `mpirun`.
    OpenMpi,
    /// Another server of PMIx, such as `srun --mpi=pmix`.
    Pmix,
    /// `burn-megatron launch`.
    BurnMegatron,
    /// A person or a script, with `RANK` and `WORLD_SIZE`.
    Manual,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Torchrun => "torchrun",
            Self::Slurm => "Slurm",
            Self::OpenMpi => "OpenMPI",
            Self::Pmix => "PMIx",
            Self::BurnMegatron => "burn-megatron launch",
            Self::Manual => "by hand",
        })
    }
}

/// Which rank this process is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Launch {
    /// What started it.
    pub launcher: Launcher,
    /// Its number among all ranks, from 0.
    pub rank: usize,
    /// The number of all ranks.
    pub world_size: usize,
    /// Its number among the ranks of its machine, from 0.
    pub local_rank: usize,
    /// The number of ranks on its machine.
    pub local_world_size: usize,
    /// Where the ranks meet, which is on the machine of rank 0; `None` where no variable names it.
    pub rendezvous: Option<Address>,
    /// A name that the ranks of this run have in common and those of another one do not have.
    pub job: Option<String>,
    /// What lets the ranks in at the rendezvous. It is not serialized.
    #[serde(skip)]
    pub token: Option<Token>,
}

/// The variables that each field of a [`Launch`] was read from, as `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Origins {
    /// Of [`Launch::rank`].
    pub rank: String,
    /// Of [`Launch::world_size`].
    pub world_size: String,
    /// Of [`Launch::local_rank`].
    pub local_rank: String,
    /// Of [`Launch::local_world_size`].
    pub local_world_size: String,
    /// Of [`Launch::rendezvous`].
    pub rendezvous: Option<String>,
    /// Of [`Launch::job`].
    pub job: Option<String>,
    /// The variable that [`Launch::token`] was read from, without its value.
    pub token: Option<String>,
}

impl Launch {
    /// Reads the environment of this process. `None` where no launcher has set a variable: then the
    /// ranks of a program are threads.
    ///
    /// # Errors
    /// [`LaunchError`] where variables contradict each other or cannot be read.
    pub fn from_env() -> Result<Option<Launch>, LaunchError> {
        Launch::from_vars(&env_var)
    }

    /// The same from any environment: `vars` gives the value of a name.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(vars: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launch>, LaunchError> {
        let found = Launch::with_origins(vars)?;
        Ok(found.map(|(launch, _)| launch))
    }

    /// Takes the token from a file of mode 0600.
    ///
    /// # Errors
    /// [`TokenError`], also where the variable holds another token.
    pub fn with_token_file(mut self, path: &Path) -> Result<Launch, TokenError> {
        self.token = Some(Token::from_file_beside(path, self.token.as_ref())?);
        Ok(self)
    }

    /// Whether the ranks are on several machines.
    pub fn is_spread(&self) -> bool {
        self.local_world_size < self.world_size
    }

    /// A number that the ranks of this run have in common; 0 where nothing tells runs apart.
    pub(super) fn number(&self) -> u64 {
        self.job.as_deref().map_or(0, rendezvous::hash)
    }

    /// As [`from_vars`](Self::from_vars), together with the variables that were used.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn with_origins(
        vars: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<(Launch, Origins)>, LaunchError> {
        let vars = Vars(vars);
        let Some((launcher, seat)) = launcher(vars)? else {
            return Ok(None);
        };
        let seat = seat.check()?;
        let job = rendezvous::job(vars, launcher)?;
        let (rendezvous, met) = rendezvous::rendezvous(vars, launcher, &seat)?.unzip();
        let (job, named) = job.map(|(job, from)| (job.name(), from)).unzip();
        let token = token(vars)?;
        let launch = Launch {
            launcher,
            rank: seat.rank.value,
            world_size: seat.world_size.value,
            local_rank: seat.local_rank.value,
            local_world_size: seat.local_world_size.value,
            rendezvous,
            job,
            token: token.clone(),
        };
        let origins = Origins {
            rank: seat.rank.from,
            world_size: seat.world_size.from,
            local_rank: seat.local_rank.from,
            local_world_size: seat.local_world_size.from,
            rendezvous: met,
            job: named,
            token: token.as_ref().map(|_| Token::VARIABLE.to_owned()),
        };
        Ok(Some((launch, origins)))
    }
}

/// The token, whose value stands in no error.
fn token(vars: Vars) -> Result<Option<Token>, LaunchError> {
    let given = vars.get(Token::VARIABLE);
    let read = |given: Variable| Token::parse(&given.value, Token::VARIABLE);
    let token = given.map(read).transpose();
    token.map_err(|error| LaunchError::Token(error.to_string()))
}

/// A variable of this process. What is no Unicode is not left out, but has marks in its place, so that
/// an error can tell of it.
pub fn env_var(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The launcher that started this very process, in the order of the table above.
fn launcher(vars: Vars) -> Result<Option<(Launcher, Seat)>, LaunchError> {
    let ranked = vars.has("RANK");
    if ranked && vars.has("TORCHELASTIC_RUN_ID") {
        return Ok(Some((Launcher::Torchrun, Seat::of_launcher(vars)?)));
    }
    if ranked && vars.has("BURN_MEGATRON_RENDEZVOUS") {
        return Ok(Some((Launcher::BurnMegatron, Seat::of_launcher(vars)?)));
    }
    if vars.has("OMPI_COMM_WORLD_RANK") {
        let seat = Seat::of_open_mpi(vars)?;
        seat.agrees_with_hand(vars)?;
        return Ok(Some((Launcher::OpenMpi, seat)));
    }
    if slurm::is_task(vars)? {
        let seat = slurm::seat(vars)?;
        seat.agrees_with_hand(vars)?;
        return Ok(Some((check_pmix(vars, &seat)?, seat)));
    }
    match ranked || vars.has("WORLD_SIZE") {
        true => by_hand(vars).map(Some),
        false => pmix_alone(vars).map(|()| None),
    }
}

/// Slurm, or PMIx under it, whose rank is the same.
fn check_pmix(vars: Vars, seat: &Seat) -> Result<Launcher, LaunchError> {
    match vars.number("PMIX_RANK")? {
        None => Ok(Launcher::Slurm),
        Some(rank) => agree("rank", &rank, &seat.rank).map(|()| Launcher::Pmix),
    }
}

fn by_hand(vars: Vars) -> Result<(Launcher, Seat), LaunchError> {
    let seat = Seat::by_hand(vars)?;
    if let Some(rank) = pmix_rank(vars) {
        agree("rank", &seat.rank, &rank.number()?)?;
    }
    Ok((Launcher::Manual, seat))
}

/// PMIx tells a rank, but its size only to programs that ask its server.
fn pmix_alone(vars: Vars) -> Result<(), LaunchError> {
    match pmix_rank(vars) {
        None => Ok(()),
        Some(rank) => Err(LaunchError::Missing {
            found: rank.to_string(),
            missing: "the number of ranks".into(),
            cure: "start the program with srun or OpenMPI's mpirun, or set RANK, WORLD_SIZE, \
                   LOCAL_RANK and LOCAL_WORLD_SIZE",
        }),
    }
}

/// The rank of PMIx where Slurm starts no tasks. The shell of `salloc` has one that means nothing.
fn pmix_rank(vars: Vars) -> Option<Variable> {
    match vars.has("SLURM_STEP_ID") {
        true => None,
        false => vars.get("PMIX_RANK"),
    }
}

#[cfg(test)]
mod tests;
