//! Where the ranks meet, from what the variables say.

use super::Launcher;
use super::address::{Address, check_host, parse_port};
use super::error::LaunchError;
use super::seat::Seat;
use super::slurm;
use super::vars::{Variable, Vars};

/// The first of the ports that are derived from a job, below those that a system gives out by itself.
const FIRST_PORT: u16 = 15_000;

/// How many they are.
const PORTS: u16 = 10_000;

/// Something, and the variables that say it.
pub(super) type Said<T> = (T, String);

/// The address, with the variables that it is from.
pub(super) fn rendezvous(
    vars: Vars,
    launcher: Launcher,
    seat: &Seat,
) -> Result<Option<Said<Address>>, LaunchError> {
    if let Some(whole) = vars.get("BURN_MEGATRON_RENDEZVOUS") {
        return whole_address(vars, whole).map(Some);
    }
    let host = match vars.get("MASTER_ADDR") {
        Some(given) => Some(given_host(&given)?),
        None => launchers_host(vars, launcher, seat)?,
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

fn whole_address(vars: Vars, whole: Variable) -> Result<Said<Address>, LaunchError> {
    let wrong = |source| LaunchError::Address {
        variable: whole.to_string(),
        source,
    };
    let address: Address = whole.value.parse().map_err(wrong)?;
    match own_port(vars)? {
        Some((port, from)) if port != address.port => Err(LaunchError::Disagree {
            what: "port of the rendezvous",
            first: whole.to_string(),
            second: from,
        }),
        _ => Ok((address, whole.to_string())),
    }
}

fn given_host(given: &Variable) -> Result<Said<String>, LaunchError> {
    let wrong = |source| LaunchError::Address {
        variable: given.to_string(),
        source,
    };
    let host = check_host(&given.value).map_err(wrong)?;
    Ok((host, given.to_string()))
}

fn launchers_host(
    vars: Vars,
    launcher: Launcher,
    seat: &Seat,
) -> Result<Option<Said<String>>, LaunchError> {
    let all_here = seat.local_world_size.value == seat.world_size.value;
    match launcher {
        Launcher::Slurm | Launcher::Pmix => {
            let (host, from) = slurm::first_host(vars)?;
            let wrong = |source| LaunchError::Address {
                variable: from.clone(),
                source,
            };
            Ok(Some((check_host(&host).map_err(wrong)?, from)))
        }
        Launcher::OpenMpi if all_here => {
            let from = format!("{} (all on one machine)", seat.local_world_size.from);
            Ok(Some(("127.0.0.1".into(), from)))
        }
        _ => Ok(None),
    }
}

/// A port for a host that nobody names is a mistake.
fn no_host(vars: Vars) -> Result<(), LaunchError> {
    match vars.get("MASTER_PORT") {
        None => Ok(()),
        Some(port) => Err(LaunchError::Missing {
            found: port.to_string(),
            missing: "MASTER_ADDR".into(),
            cure: "set it to the host of rank 0, or unset MASTER_PORT",
        }),
    }
}

/// The port on a host that `host_from` names.
fn port(vars: Vars, launcher: Launcher, host_from: &str) -> Result<Said<u16>, LaunchError> {
    if let Some(own) = own_port(vars)? {
        return Ok(own);
    }
    if let Some(given) = vars.get("MASTER_PORT") {
        return given_port(vars, launcher, &given);
    }
    match job(vars, launcher)? {
        Some((job, from)) => Ok((port_of(&job), from)),
        None => Err(LaunchError::Missing {
            found: host_from.into(),
            missing: "MASTER_PORT".into(),
            cure: "set it to a port that is free on that host",
        }),
    }
}

fn own_port(vars: Vars) -> Result<Option<Said<u16>>, LaunchError> {
    let own = vars.get("BURN_MEGATRON_PORT");
    own.map(|own| read_port(&own)).transpose()
}

/// torchrun's agent listens on `MASTER_PORT` itself where it says that its store is to be used, so
/// that the ranks need the next one.
fn given_port(vars: Vars, launcher: Launcher, given: &Variable) -> Result<Said<u16>, LaunchError> {
    let (port, from) = read_port(given)?;
    let agent = vars.get("TORCHELASTIC_USE_AGENT_STORE");
    match agent {
        Some(agent) if launcher == Launcher::Torchrun && agent.value == "True" => {
            let above = port.checked_add(1).ok_or(LaunchError::NoPortAbove {
                variable: from.clone(),
            })?;
            Ok((above, format!("{from} + 1 as {agent}")))
        }
        _ => Ok((port, from)),
    }
}

fn read_port(given: &Variable) -> Result<Said<u16>, LaunchError> {
    let wrong = |source| LaunchError::Address {
        variable: given.to_string(),
        source,
    };
    let port = parse_port(given.value.trim()).map_err(wrong)?;
    Ok((port, given.to_string()))
}

/// A name that all ranks of a run have in common and other runs do not have.
#[derive(Clone, Debug)]
pub(super) enum Job {
    Slurm { job: usize, step: usize },
    Named(String),
}

/// The name of the run under this launcher.
pub(super) fn job(vars: Vars, launcher: Launcher) -> Result<Option<Said<Job>>, LaunchError> {
    let variable = match launcher {
        Launcher::Slurm | Launcher::Pmix => {
            let (job, step) = slurm::job(vars)?;
            let from = format!("{}, {}", job.from, step.from);
            let (job, step) = (job.value, step.value);
            return Ok(Some((Job::Slurm { job, step }, from)));
        }
        Launcher::OpenMpi => vars.first(&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]),
        // What torchrun says where nobody named the run.
        Launcher::Torchrun => vars
            .get("TORCHELASTIC_RUN_ID")
            .filter(|id| id.value != "none"),
        Launcher::BurnMegatron | Launcher::Manual => None,
    };
    Ok(variable.map(|variable| (Job::Named(variable.value.clone()), variable.to_string())))
}

impl Job {
    pub fn name(&self) -> String {
        match self {
            Job::Slurm { job, step } => format!("{job}.{step}"),
            Job::Named(name) => name.clone(),
        }
    }
}

/// A port that every rank of a run derives alike.
fn port_of(job: &Job) -> u16 {
    let number = match job {
        // The steps of a job lie 997 apart, out of the way of the jobs that follow it.
        Job::Slurm { job, step } => (*job as u64).wrapping_add((*step as u64).wrapping_mul(997)),
        Job::Named(name) => hash(name),
    };
    FIRST_PORT + (number % u64::from(PORTS)) as u16
}

/// FNV-1a, 64 bits: the same on every machine.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
