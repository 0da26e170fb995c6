//! Functions that read the rank of this process from the environment variables of its launcher.
//!
//! | launcher | recognized by | rank, size, local rank, local size |
//! |---|---|---|
//! | torchrun | `TORCHELASTIC_RUN_ID` | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
//! | `burn-megatron launch` | `BURN_MEGATRON_RENDEZVOUS` and `RANK` | the same |
//! | OpenMPI's mpirun | `OMPI_COMM_WORLD_RANK` | `OMPI_COMM_WORLD_RANK`, `_SIZE`, `_LOCAL_RANK`, `_LOCAL_SIZE` |
//! | `srun` | `SLURM_STEP_ID` of a step | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`, `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` at `SLURM_NODEID` |
//! | `srun --mpi=pmix` | the same, and `PMIX_RANK` | the same; `PMIX_RANK` must be equal |
//! | by hand | `RANK` or `WORLD_SIZE` | the same as torchrun; the local values are optional on one machine |
//!
//! The first matching row is used. A launcher that may run inside another launcher comes first in the table, because
//! its rank numbers differ from the rank numbers of the outer launcher. For example, torchrun may run once per node
//! under `srun` or `mpirun`, and `mpirun` may run in a Slurm job. If you set the variables *by hand* in addition to the
//! variables of OpenMPI or Slurm, their values must be equal.
//!
//! **Slurm's batch scripts and shells are not ranks.** `sbatch` and `salloc` also set `SLURM_PROCID=0` and
//! `SLURM_NTASKS` for the batch script or the shell. Only `SLURM_STEP_ID` distinguishes them from a task. In a batch
//! script, this variable is not set. In the shell of `salloc`, its value is greater than 4294967280. Slurm reserves
//! these values.
//!
//! # The rendezvous
//!
//! The address is taken from the first of these sources that is set:
//!
//! - `BURN_MEGATRON_RENDEZVOUS=host:port`.
//! - A host and a port. If no host is set, there is no rendezvous.
//!
//! The host is taken from the first of these sources that is set:
//!
//! - `MASTER_ADDR`.
//! - Under Slurm, the first host of `SLURM_STEP_NODELIST`, `SLURM_JOB_NODELIST` or `SLURM_NODELIST`.
//! - Under OpenMPI, `127.0.0.1` if all ranks are on one machine.
//!
//! The port is taken from the first of these sources that is set:
//!
//! - `BURN_MEGATRON_PORT`.
//! - `MASTER_PORT`. Under torchrun with `TORCHELASTIC_USE_AGENT_STORE=True`, the port is `MASTER_PORT` + 1, because the
//!   agent itself listens on `MASTER_PORT`.
//! - Under Slurm, 15000 + (`SLURM_JOB_ID` + 997 `SLURM_STEP_ID`) mod 10000.
//! - Under OpenMPI and torchrun, 15000 + (64-bit FNV-1a hash of the id of the run) mod 10000. Under OpenMPI, the id is
//!   `PMIX_NAMESPACE` or `OMPI_MCA_ess_base_jobid`. Under torchrun, the id is `TORCHELASTIC_RUN_ID`.
//!
//! The [token](crate::Token) that a rank needs to join the rendezvous is read from `BURN_MEGATRON_TOKEN`.

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

/// The launcher that started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Launcher {
    /// torchrun of PyTorch.
    Torchrun,
    /// `srun` of Slurm.
    Slurm,
    /// `mpirun` of OpenMPI.
    OpenMpi,
    /// `srun --mpi=pmix` of Slurm.
    Pmix,
    /// `burn-megatron launch`.
    BurnMegatron,
    /// No launcher. `RANK` and `WORLD_SIZE` were set by hand or by a script.
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

/// The rank of this process and the settings of its run, as set by the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Launch {
    /// The launcher that started this process.
    pub launcher: Launcher,
    /// The rank of this process, counted from 0.
    pub rank: usize,
    /// The number of ranks in the run.
    pub world_size: usize,
    /// The index of this process among the ranks of this machine, counted from 0.
    pub local_rank: usize,
    /// The number of ranks on this machine.
    pub local_world_size: usize,
    /// The address of the rendezvous server on the machine of rank 0, or `None` if no variable sets it.
    pub rendezvous: Option<Address>,
    /// The id of the run. All ranks of a run have the same id. Different runs have different ids.
    pub job: Option<String>,
    /// The token that the rendezvous server requires. It is not serialized.
    #[serde(skip)]
    pub token: Option<Token>,
}

/// The environment variables from which the fields of a [`Launch`] were read, as `NAME=value`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Origins {
    /// The variables from which [`Launch::rank`] was read.
    pub rank: String,
    /// The variables from which [`Launch::world_size`] was read.
    pub world_size: String,
    /// The variables from which [`Launch::local_rank`] was read.
    pub local_rank: String,
    /// The variables from which [`Launch::local_world_size`] was read.
    pub local_world_size: String,
    /// The variables from which [`Launch::rendezvous`] was read.
    pub rendezvous: Option<String>,
    /// The variables from which [`Launch::job`] was read.
    pub job: Option<String>,
    /// The name of the variable from which [`Launch::token`] was read, without its value.
    pub token: Option<String>,
}

impl Launch {
    /// Reads the rank of this process from its environment variables. Returns `None` if no launcher has set its
    /// variables. In this case, the ranks are threads.
    ///
    /// # Errors
    /// [`LaunchEnvError`] if the variables are invalid or contradict each other.
    pub fn from_env() -> Result<Option<Launch>, LaunchEnvError> {
        Launch::from_vars(&env_var)
    }

    /// Same as [`from_env`](Self::from_env), but gets the variables from `vars`, a function that returns the value of a
    /// variable.
    ///
    /// # Errors
    /// The errors of [`from_env`](Self::from_env).
    pub fn from_vars(
        vars: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Option<Launch>, LaunchEnvError> {
        let found = Launch::with_origins(vars)?;
        Ok(found.map(|(launch, _)| launch))
    }

    /// Reads the token from a file with mode 0600 or 0400 and adds it to this launch.
    ///
    /// # Errors
    /// [`TokenError`], for example if the environment variable contains a different token.
    pub fn with_token_file(mut self, path: &Path) -> Result<Launch, TokenError> {
        self.token = Some(Token::from_file_matching(path, self.token.as_ref())?);
        Ok(self)
    }

    /// Returns whether the ranks are on several machines.
    pub fn is_multi_node(&self) -> bool {
        self.local_world_size < self.world_size
    }

    /// The name of the variable that contains the id of a world that `burn-megatron launch` has started. The id changes
    /// after each restart.
    pub const JOB_ID: &str = "BURN_MEGATRON_JOB_ID";

    /// Returns a hash of the id of the run. Returns 0 if the run has no id.
    pub fn world_id(&self) -> u64 {
        self.job.as_deref().map_or(0, world_id_of)
    }

    /// Same as [`from_vars`](Self::from_vars), but also returns the variables that were used.
    ///
    /// # Errors
    /// The errors of [`from_env`](Self::from_env).
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

/// Returns the numeric id of the world of a job. It is equal on every machine.
pub(crate) fn world_id_of(job: &str) -> u64 {
    rendezvous::hash(job)
}

/// Reads the token from the variables. Errors do not contain the token.
fn token(vars: Vars) -> Result<Option<Token>, LaunchEnvError> {
    let given = vars.get(Token::VARIABLE);
    let read = |given: Variable| Token::parse(&given.value, Token::VARIABLE);
    let token = given.map(read).transpose();
    token.map_err(|error| LaunchEnvError::Token(error.to_string()))
}

/// Returns the value of an environment variable of this process. A value with invalid Unicode is not ignored. Its
/// invalid characters are replaced, so that an error message can contain the value.
pub fn env_var(name: &str) -> Option<String> {
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Returns the launcher of this process and its ranks. The launchers are checked in the order of the table above.
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

/// Returns whether Slurm or PMIx under Slurm started this process. The PMIx rank must be equal to the Slurm rank.
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

/// Returns an error if only the rank of PMIx is set. PMIx sets no variable for the number of ranks.
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

/// Returns the PMIx rank outside of Slurm steps. The shell of `salloc` has a PMIx rank, but it is not a rank.
fn pmix_rank(vars: Vars) -> Option<Variable> {
    if vars.has("SLURM_STEP_ID") {
        return None;
    }
    vars.get("PMIX_RANK")
}

#[cfg(test)]
mod tests;
