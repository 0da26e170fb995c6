//! Reads the address of the rendezvous and the id of the run from the environment variables.

use super::address::{Address, AddressError, check_host, parse_port};
use super::error::LaunchEnvError;
use super::rank_info::RankInfo;
use super::slurm;
use super::vars::{Variable, Vars};
use super::{Launch, Launcher};

/// The first of the ports that can be derived from the id of a job. These ports are below the ephemeral ports of the
/// system.
const FIRST_PORT: u16 = 15_000;

/// The number of ports that can be derived from the id of a job.
const PORTS: u16 = 10_000;

/// A value and the variables from which it was read.
pub(super) type Sourced<T> = (T, String);

/// Returns the address of the rendezvous server, or `None` if no variable sets it.
pub(super) fn rendezvous(
    vars: Vars,
    launcher: Launcher,
    info: &RankInfo,
) -> Result<Option<Sourced<Address>>, LaunchEnvError> {
    if let Some(full) = vars.get("BURN_MEGATRON_RENDEZVOUS") {
        return full_address(vars, full).map(Some);
    }
    let host = match vars.get("MASTER_ADDR") {
        Some(given) => Some(given_host(&given)?),
        None => launcher_host(vars, launcher, info)?,
    };
    let Some((host, host_from)) = host else {
        return no_host(vars).map(|()| None);
    };
    let (port, port_from) = port(vars, launcher, &host_from)?;
    Ok(Some((
        Address { host, port },
        format!("{host_from}, {port_from}"),
    )))
}

fn full_address(vars: Vars, full: Variable) -> Result<Sourced<Address>, LaunchEnvError> {
    let address: Address = full.value.parse().map_err(invalid(&full))?;
    match own_port(vars)? {
        Some((port, from)) if port != address.port => Err(LaunchEnvError::Conflict {
            what: "port of the rendezvous",
            first: full.to_string(),
            second: from,
        }),
        _ => Ok((address, full.to_string())),
    }
}

fn given_host(given: &Variable) -> Result<Sourced<String>, LaunchEnvError> {
    let host = check_host(&given.value).map_err(invalid(given))?;
    Ok((host, given.to_string()))
}

fn launcher_host(
    vars: Vars,
    launcher: Launcher,
    info: &RankInfo,
) -> Result<Option<Sourced<String>>, LaunchEnvError> {
    let all_here = info.local_world_size.value == info.world_size.value;
    match launcher {
        Launcher::Slurm | Launcher::Pmix => {
            let (host, from) = slurm::first_host(vars)?;
            let host = check_host(&host).map_err(invalid(&from))?;
            Ok(Some((host, from)))
        }
        Launcher::OpenMpi if all_here => {
            let from = format!("{} (all on one machine)", info.local_world_size.from);
            Ok(Some(("127.0.0.1".into(), from)))
        }
        _ => Ok(None),
    }
}

/// Creates the error for an invalid address in `variable`.
fn invalid(variable: &impl ToString) -> impl FnOnce(AddressError) -> LaunchEnvError {
    let variable = variable.to_string();
    move |source| LaunchEnvError::Address { variable, source }
}

/// Returns an error if `MASTER_PORT` is set, because a port requires a host.
fn no_host(vars: Vars) -> Result<(), LaunchEnvError> {
    match vars.get("MASTER_PORT") {
        None => Ok(()),
        Some(port) => Err(LaunchEnvError::Missing {
            found: port.to_string(),
            missing: "MASTER_ADDR".into(),
            hint: "set it to the host of rank 0, or unset MASTER_PORT",
        }),
    }
}

/// Returns the port of the rendezvous server. `host_from` is the variable from which the host was read.
fn port(vars: Vars, launcher: Launcher, host_from: &str) -> Result<Sourced<u16>, LaunchEnvError> {
    if let Some(own) = own_port(vars)? {
        return Ok(own);
    }
    if let Some(given) = vars.get("MASTER_PORT") {
        return given_port(vars, launcher, &given);
    }
    match job(vars, launcher)? {
        Some(job) => Ok((
            FIRST_PORT + (job.number % u64::from(PORTS)) as u16,
            job.from,
        )),
        None => Err(LaunchEnvError::Missing {
            found: host_from.into(),
            missing: "MASTER_PORT".into(),
            hint: "set it to a port that is free on that host",
        }),
    }
}

fn own_port(vars: Vars) -> Result<Option<Sourced<u16>>, LaunchEnvError> {
    let own = vars.get("BURN_MEGATRON_PORT");
    own.map(|own| read_port(&own)).transpose()
}

/// Returns the port that `MASTER_PORT` sets. If torchrun's agent store is in use, the agent listens on `MASTER_PORT`,
/// so the ranks use the next port.
fn given_port(
    vars: Vars,
    launcher: Launcher,
    given: &Variable,
) -> Result<Sourced<u16>, LaunchEnvError> {
    let (port, from) = read_port(given)?;
    let agent = vars.get("TORCHELASTIC_USE_AGENT_STORE");
    match agent {
        Some(agent) if launcher == Launcher::Torchrun && agent.value == "True" => {
            let above = port.checked_add(1).ok_or(LaunchEnvError::NoPortAbove {
                variable: from.clone(),
            })?;
            Ok((above, format!("{from} + 1 as {agent}")))
        }
        _ => Ok((port, from)),
    }
}

fn read_port(given: &Variable) -> Result<Sourced<u16>, LaunchEnvError> {
    let port = parse_port(given.value.trim()).map_err(invalid(given))?;
    Ok((port, given.to_string()))
}

/// The id of a run. All ranks of a run have the same id. Different runs have different ids.
pub(super) struct Job {
    pub name: String,
    /// The number from which the port of the rendezvous is derived.
    pub number: u64,
    /// The variables from which the id was read.
    pub from: String,
}

/// Returns the id of the run under this launcher, or `None` if the run has no id.
pub(super) fn job(vars: Vars, launcher: Launcher) -> Result<Option<Job>, LaunchEnvError> {
    let variable = match launcher {
        Launcher::Slurm | Launcher::Pmix => return slurm::job(vars).map(Some),
        Launcher::OpenMpi => vars.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]),
        // "none" is the default of torchrun.
        Launcher::Torchrun => vars
            .get("TORCHELASTIC_RUN_ID")
            .filter(|id| id.value != "none"),
        Launcher::BurnMegatron => vars.get(Launch::JOB_ID),
        Launcher::Manual => None,
    };
    Ok(variable.map(|variable| Job {
        number: hash(&variable.value),
        from: variable.to_string(),
        name: variable.value,
    }))
}

/// Returns the 64-bit FNV-1a hash of a text. It is equal on every machine.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
