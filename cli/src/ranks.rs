//! The ranks of a run: threads of this process, or processes that a launcher started.

use std::env;
use std::path::{Path, PathBuf};
use std::time::Duration;

use burn_megatron::comm::{Engine, Launch, NcclConfig, World, WorldError};
use burn_megatron::device::DeviceKind;
use clap::Args;
use toml::Table;

use crate::error::Error;
use crate::settings::SettingFlags;

/// Flags of the communication between ranks.
#[derive(Args)]
#[command(next_help_heading = "Communication")]
pub struct RankArgs {
    /// Communication engine: threads, nccl or mpi. With threads, all ranks are threads of this process, which is the
    /// default. If a launcher started this process as one of several ranks, the default is mpi, or nccl with --device
    /// cuda.
    #[arg(long, value_name = "threads|nccl|mpi")]
    pub engine: Option<Engine>,
    /// Timeout of a collective in seconds. The error message names the ranks that are missing.
    #[arg(long = "timeout", value_name = "SECONDS", default_value_t = 100.0)]
    pub deadline: f64,
    /// Timeout in seconds of the first collective of a process group, and of all collectives in the first step. If
    /// ranks are processes, it is also the timeout of the rendezvous, in which all ranks connect.
    #[arg(
        long = "first-timeout",
        value_name = "SECONDS",
        default_value_t = 300.0,
        hide_short_help = true
    )]
    pub first_deadline: f64,
    /// Time in seconds without a heartbeat after which the process of a rank is considered lost.
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 30.0,
        hide_short_help = true
    )]
    pub heartbeat_timeout: f64,
    /// File that contains the token with which the ranks authenticate: 64 hexadecimal digits, the same for all ranks.
    /// The file must have mode 0600. The default is the environment variable BURN_MEGATRON_TOKEN. With `launch` and
    /// mpirun, no token is needed.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub token_file: Option<PathBuf>,
}

/// The variable that sets the engine for ranks that `launch` starts.
pub const ENGINE: &str = "BURN_MEGATRON_ENGINE";

/// The time that ranks that are threads may still run after a rank has failed, as with processes.
const FAILURE_GRACE: Duration = Duration::from_secs(5);

/// World of a run, and the rank of this process in it.
pub struct RankSetup {
    /// All ranks.
    pub world: World,
    /// The rank of this process, or `None` if the ranks are threads of the process.
    pub own_rank: Option<usize>,
    /// The local rank.
    pub local_rank: usize,
    /// The number of ranks on this machine.
    pub on_this_machine: usize,
    /// The communication engine.
    pub engine: Engine,
}

/// Sets up `wanted` ranks from the flags and the launcher's variables. `settings` contains the NCCL flags.
pub fn set_up(
    args: &RankArgs,
    settings: &SettingFlags,
    device: DeviceKind,
    wanted: usize,
) -> Result<RankSetup, Error> {
    let launch = with_token(Launch::from_env()?, args.token_file.as_deref())?;
    let engine = env::var(ENGINE).ok().filter(|_| launch.is_some());
    let engine = engine.map(|name| {
        name.parse::<Engine>()
            .map_err(|error| format!("{ENGINE}: {error}"))
    });
    let engine = args.engine.or(engine.transpose()?);
    let ranks = match (launch, engine) {
        (None, None | Some(Engine::Threads)) => threads(wanted)?,
        (None, Some(_)) => return Err(WorldError::NotLaunched.into()),
        (Some(launch), None | Some(Engine::Threads)) if launch.world_size == 1 => threads(wanted)?,
        (Some(launch), engine) => processes(launch, engine, device, wanted)?,
    };
    let mut keys = settings.keys();
    if let Some(key) = keys.find(|key| key.starts_with("nccl."))
        && ranks.engine != Engine::Nccl
    {
        return Err(format!("--{key} requires processes with --engine nccl: remove it").into());
    }
    let nccl: NcclConfig = match settings.table(&Table::new()).remove("nccl") {
        Some(nccl) => nccl.try_into()?,
        None => NcclConfig::default(),
    };
    let world = ranks
        .world
        .deadline(seconds("timeout", args.deadline)?)
        .first_deadline(seconds("first-timeout", args.first_deadline)?)
        .heartbeat_timeout(seconds("heartbeat-timeout", args.heartbeat_timeout)?)
        .grace(FAILURE_GRACE)
        .nccl(nccl);
    Ok(RankSetup { world, ..ranks })
}

/// Adds the token of a file, if a file was given.
fn with_token(launch: Option<Launch>, file: Option<&Path>) -> Result<Option<Launch>, Error> {
    match (launch, file) {
        (launch, None) => Ok(launch),
        (Some(launch), Some(file)) => Ok(Some(launch.with_token_file(file)?)),
        (None, Some(_)) => Err(
            "--token-file requires ranks that are processes, but no launcher started this one: remove it"
                .into(),
        ),
    }
}

fn threads(wanted: usize) -> Result<RankSetup, Error> {
    Ok(RankSetup {
        world: World::threads(wanted)?,
        own_rank: None,
        local_rank: 0,
        on_this_machine: wanted,
        engine: Engine::Threads,
    })
}

fn processes(
    launch: Launch,
    engine: Option<Engine>,
    device: DeviceKind,
    wanted: usize,
) -> Result<RankSetup, Error> {
    check_size(launch.world_size, wanted)?;
    let by_device = match device {
        DeviceKind::Cuda => Engine::Nccl,
        DeviceKind::Cpu | DeviceKind::Wgpu => Engine::Mpi,
    };
    let engine = engine.unwrap_or(by_device);
    if engine == Engine::Nccl && device != DeviceKind::Cuda {
        return Err(format!(
            "--engine nccl requires --device cuda, not --device {device}; use --engine mpi or --device cuda"
        )
        .into());
    }
    Ok(RankSetup {
        own_rank: Some(launch.rank),
        local_rank: launch.local_rank,
        on_this_machine: launch.local_world_size,
        engine,
        world: World::processes(launch).engine(engine),
    })
}

fn check_size(started: usize, wanted: usize) -> Result<(), Error> {
    if started == wanted {
        Ok(())
    } else {
        Err(format!(
            "{started} ranks were started, but the layout has {wanted}: start {wanted}, or change \
             --tp, --dp or --pp"
        )
        .into())
    }
}

/// Converts the seconds of a flag to a duration.
pub fn seconds(flag: &str, value: f64) -> Result<Duration, Error> {
    if value > 0.0 && value <= 1e9 {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err(
            format!("invalid --{flag} {value}: expected a number of seconds above 0, at most 1e9")
                .into(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_of_another_size_is_refused() {
        assert!(check_size(4, 4).is_ok());
        insta::assert_snapshot!(
            check_size(2, 4).unwrap_err(),
            @"2 ranks were started, but the layout has 4: start 4, or change --tp, \
              --dp or --pp"
        );
    }

    #[test]
    fn a_token_file_without_processes_is_refused() {
        let error = with_token(None, Some(Path::new("x")))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--token-file requires ranks that are processes"),
            "{error}"
        );
        assert!(with_token(None, None).unwrap().is_none());
    }

    #[test]
    fn times_are_checked() {
        assert_eq!(
            seconds("timeout", 2.5).unwrap(),
            Duration::from_millis(2500)
        );
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = seconds("heartbeat-timeout", value).unwrap_err().to_string();
            assert!(error.starts_with("invalid --heartbeat-timeout "), "{error}");
        }
    }
}
