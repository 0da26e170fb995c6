//! The rank of this process, from the environment variables of its launcher.
//!
//! | launcher | recognised by | rank, size, local rank, local size |
//! |---|---|---|
//! | torchrun | `TORCHELASTIC_RUN_ID` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
//! | `burn-megatron launch` | `BURN_MEGATRON_RENDEZVOUS` and `RANK` | the same |
//! | OpenMPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | `srun` | `SLURM_STEP_ID` of a step | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
//! | `srun --mpi=pmix` | the same, and `PMIX_RANK` | the same; `PMIX_RANK` must be equal |
//! | by hand | `RANK` or `WORLD_SIZE` | the same as torchrun; the local ones may be left out where all ranks are on one machine |
//!
//! The first matching row is used. Launchers that may run inside of another one come first: one torchrun per
//! node under `srun` or `mpirun`, and `mpirun` in a Slurm job. Their numbers differ from those of the outer
//! launcher. Variables set *by hand* beside OpenMPI's or Slurm's must be equal to them.
//!
//! **Slurm's batch scripts and shells are not ranks.** `sbatch` and `salloc` set `SLURM_PROCID=0` and
//! `SLURM_NTASKS` for the script or shell too; only `SLURM_STEP_ID` distinguishes them from a task: it is not
//! set in the script, and in the shell of `salloc` it is above 4294967280, which Slurm reserves.
//!
//! # The rendezvous
//!
//! Its address, from the first of these that is set:
//!
//! - `BURN_MEGATRON_RENDEZVOUS=host:port`;
//! - host: `MASTER_ADDR`; the first host of `SLURM_STEP_NODELIST`, or of `SLURM_JOB_NODELIST`;
//!   `127.0.0.1` under OpenMPI if all ranks are on one machine; otherwise there is none;
//! - port: `BURN_MEGATRON_PORT`; `MASTER_PORT`, and under torchrun with
//!   `TORCHELASTIC_USE_AGENT_STORE=True` the port above it, as the agent listens on `MASTER_PORT` itself;
//!   15000 + (`SLURM_JOB_ID` + 997 `SLURM_STEP_ID`) mod 10000; 15000 + (64-bit FNV-1a of
//!   `PMIX_NAMESPACE`, OpenMPI's name of the job) mod 10000.
//!
//! The [token](crate::Token) that ranks need to join is `BURN_MEGATRON_TOKEN`.

mod address;
mod error;
mod node_list;
mod rank_info;
mod rendezvous;
mod slurm;
mod vars;

use std::env;
use std::fmt;
use std::path::Path;

use serde::Serialize;

use crate::auth::{Token, TokenError};
pub use address::{Address, AddressError};
pub use error::LaunchEnvError;
pub use node_list::NodeListError;
use rank_info::{RankInfo, check_equal};
use vars::{Variable, Vars};

/// The launcher of the ranks.
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
    /// Another PMIx server, such as `srun --mpi=pmix`.
    Pmix,
    /// `burn-megatron launch`.
    BurnMegatron,
    /// `RANK` and `WORLD_SIZE` set by hand or by a script.
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
    /// Its launcher.
    pub launcher: Launcher,
    /// The rank, from 0.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The index among the ranks of this machine, from 0.
    pub local_rank: usize,
    /// The number of ranks on this machine.
    pub local_world_size: usize,
    /// The address of the rendezvous, on the machine of rank 0; `None` if no variable sets it.
    pub rendezvous: Option<Address>,
    /// The id of the run: equal on all its ranks, and different from that of other runs.
    pub job: Option<String>,
    /// The token that the rendezvous requires. It is not serialized.
    #[serde(skip)]
    pub token: Option<Token>,
}

/// The variables that the fields of a [`Launch`] were read from, as `NAME=value`.
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
    /// Reads the environment of this process. `None` if no launcher's variables are set: ranks are threads
    /// then.
    ///
    /// # Errors
    /// [`LaunchEnvError`] if variables are invalid or contradict each other.
    pub fn from_env() -> Result<Option<Launch>, LaunchEnvError> {
        Launch::from_vars(&env_var)
    }

    /// [`from_env`](Self::from_env) for any environment: `vars` returns the value of a variable.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_vars(
        vars: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Launch>, LaunchEnvError> {
        let found = Launch::with_origins(vars)?;
        Ok(found.map(|(launch, _)| launch))
    }

    /// Reads the token from a file of mode 0600.
    ///
    /// # Errors
    /// [`TokenError`], also if the variable holds another token.
    pub fn with_token_file(mut self, path: &Path) -> Result<Launch, TokenError> {
        self.token = Some(Token::from_file_matching(path, self.token.as_ref())?);
        Ok(self)
    }

    /// Whether the ranks are on several machines.
    pub fn is_multi_node(&self) -> bool {
        self.local_world_size < self.world_size
    }

    /// The variable with the id of a world that `burn-megatron launch` has started: another one after each restart.
    pub const JOB_ID: &str = "BURN_MEGATRON_JOB_ID";

    /// A hash of the id of the run; 0 if it has none.
    pub fn world_id(&self) -> u64 {
        self.job.as_deref().map_or(0, world_id_of)
    }

    /// As [`from_vars`](Self::from_vars), together with the variables that were used.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn with_origins(
        vars: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<(Launch, Origins)>, LaunchEnvError> {
        let vars = Vars(vars);
        let Some((launcher, info)) = launcher(vars)? else {
            return Ok(None);
        };
        let info = info.check()?;
        let job = rendezvous::job(vars, launcher)?;
        let (rendezvous, rendezvous_from) = rendezvous::rendezvous(vars, launcher, &info)?.unzip();
        let (job, job_from) = job.map(|job| (job.name, job.from)).unzip();
        let token = token(vars)?;
        let launch = Launch {
            launcher,
            rank: info.rank.value,
            world_size: info.world_size.value,
            local_rank: info.local_rank.value,
            local_world_size: info.local_world_size.value,
            rendezvous,
            job,
            token: token.clone(),
        };
        let origins = Origins {
            rank: info.rank.from,
            world_size: info.world_size.from,
            local_rank: info.local_rank.from,
            local_world_size: info.local_world_size.from,
            rendezvous: rendezvous_from,
            job: job_from,
            token: token.as_ref().map(|_| Token::VARIABLE.to_owned()),
        };
        Ok(Some((launch, origins)))
    }
}

/// The number of the world of a job, the same on every machine.
pub(crate) fn world_id_of(job: &str) -> u64 {
    rendezvous::hash(job)
}

/// The token. Errors do not contain its value.
fn token(vars: Vars) -> Result<Option<Token>, LaunchEnvError> {
    let given = vars.get(Token::VARIABLE);
    let read = |given: Variable| Token::parse(&given.value, Token::VARIABLE);
    let token = given.map(read).transpose();
    token.map_err(|error| LaunchEnvError::Token(error.to_string()))
}

/// A variable of this process. Invalid Unicode is replaced, not ignored, so that an error can report it.
pub fn env_var(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// The launcher of this process, in the order of the table above.
fn launcher(vars: Vars) -> Result<Option<(Launcher, RankInfo)>, LaunchEnvError> {
    let has_rank = vars.has("RANK");
    if has_rank && vars.has("TORCHELASTIC_RUN_ID") {
        return Ok(Some((Launcher::Torchrun, RankInfo::of_launcher(vars)?)));
    }
    if has_rank && vars.has("BURN_MEGATRON_RENDEZVOUS") {
        return Ok(Some((Launcher::BurnMegatron, RankInfo::of_launcher(vars)?)));
    }
    if vars.has("OMPI_COMM_WORLD_RANK") {
        let info = RankInfo::of_open_mpi(vars)?;
        info.check_by_hand(vars)?;
        return Ok(Some((Launcher::OpenMpi, info)));
    }
    if slurm::is_task(vars)? {
        let info = slurm::rank_info(vars)?;
        info.check_by_hand(vars)?;
        return Ok(Some((check_pmix(vars, &info)?, info)));
    }
    if has_rank || vars.has("WORLD_SIZE") {
        by_hand(vars).map(Some)
    } else {
        refuse_pmix_alone(vars).map(|()| None)
    }
}

/// Slurm, or PMIx under it, whose rank is the same.
fn check_pmix(vars: Vars, info: &RankInfo) -> Result<Launcher, LaunchEnvError> {
    match vars.number("PMIX_RANK")? {
        None => Ok(Launcher::Slurm),
        Some(rank) => check_equal("rank", &rank, &info.rank).map(|()| Launcher::Pmix),
    }
}

fn by_hand(vars: Vars) -> Result<(Launcher, RankInfo), LaunchEnvError> {
    let info = RankInfo::by_hand(vars)?;
    if let Some(rank) = pmix_rank(vars) {
        check_equal("rank", &info.rank, &rank.number()?)?;
    }
    Ok((Launcher::Manual, info))
}

/// PMIx sets a variable for the rank, but none for the number of ranks.
fn refuse_pmix_alone(vars: Vars) -> Result<(), LaunchEnvError> {
    match pmix_rank(vars) {
        None => Ok(()),
        Some(rank) => Err(LaunchEnvError::Missing {
            found: rank.to_string(),
            missing: "the number of ranks".into(),
            hint: "start the program with srun or OpenMPI's mpirun, or set RANK, WORLD_SIZE, \
                   LOCAL_RANK and LOCAL_WORLD_SIZE",
        }),
    }
}

/// The rank of PMIx outside of Slurm steps. The shell of `salloc` has one, which is not a rank.
fn pmix_rank(vars: Vars) -> Option<Variable> {
    if vars.has("SLURM_STEP_ID") {
        return None;
    }
    vars.get("PMIX_RANK")
}

#[cfg(test)]
mod tests;
