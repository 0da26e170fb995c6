//! Where the ranks of a run are: threads of this process, or processes that a launcher started.

use std::env;
use std::path::Path;
use std::time::Duration;

use burn_megatron::comm::{Engine, Launch, World, WorldError};
use burn_megatron::device::DeviceKind;

use crate::cli::RankArgs;
use crate::recipe::Error;

/// What joins the ranks, for those that `launch` starts.
pub const ENGINE: &str = "BURN_MEGATRON_ENGINE";

/// How long ranks that are threads may go on after one has failed, as it is for processes.
const GRACE: Duration = Duration::from_secs(5);

/// The world of a run, and the place of this process in it.
pub struct Ranks {
    /// All ranks.
    pub world: World,
    /// The rank that this process is; none where the ranks are its threads.
    pub own_rank: Option<usize>,
    /// Its number among those of its machine.
    pub local_rank: usize,
    /// How many of them are on this machine.
    pub on_this_machine: usize,
    /// What joins the ranks.
    pub engine: Engine,
}

/// The `wanted` ranks, as the flags and the launcher's variables have them.
pub fn of(args: &RankArgs, device: DeviceKind, wanted: usize) -> Result<Ranks, Error> {
    let launch = with_token(Launch::from_env()?, args.token_file.as_deref())?;
    let told = env::var(ENGINE).ok().filter(|_| launch.is_some());
    let told = told.map(|name| {
        name.parse::<Engine>()
            .map_err(|error| format!("{ENGINE}: {error}"))
    });
    let told = args.engine.or(told.transpose()?);
    if args.nccl_registered && (device != DeviceKind::Cuda || launch.is_none()) {
        return Err(
            "--nccl-registered is about the engine nccl, which joins processes with GPUs".into(),
        );
    }
    let ranks = match (launch, told) {
        (None, None | Some(Engine::Threads)) => threads(wanted)?,
        (None, Some(_)) => return Err(WorldError::NotLaunched.into()),
        (Some(launch), None | Some(Engine::Threads)) if launch.world_size == 1 => threads(wanted)?,
        (Some(launch), engine) => processes(launch, engine, device, wanted)?,
    };
    let world = ranks
        .world
        .deadline(seconds("deadline", args.deadline)?)
        .first_deadline(seconds("first-deadline", args.first_deadline)?)
        .silence(seconds("silence", args.silence)?)
        .grace(GRACE)
        .registered_buffers(args.nccl_registered);
    Ok(Ranks { world, ..ranks })
}

/// The same rank with the token of a file, if one was given.
fn with_token(launch: Option<Launch>, file: Option<&Path>) -> Result<Option<Launch>, Error> {
    match (launch, file) {
        (launch, None) => Ok(launch),
        (Some(launch), Some(file)) => Ok(Some(launch.with_token_file(file)?)),
        (None, Some(_)) => Err(
            "--token-file is about ranks that are processes, and no launcher started this one; leave it out"
                .into(),
        ),
    }
}

fn threads(wanted: usize) -> Result<Ranks, Error> {
    Ok(Ranks {
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
) -> Result<Ranks, Error> {
    check_size(launch.world_size, wanted)?;
    let by_device = match device {
        DeviceKind::Cuda => Engine::Nccl,
        DeviceKind::Cpu | DeviceKind::Wgpu => Engine::Mpi,
    };
    let engine = engine.unwrap_or(by_device);
    if engine == Engine::Nccl && device != DeviceKind::Cuda {
        return Err(format!(
            "the engine nccl joins GPUs, and --device {device} computes elsewhere; --engine mpi or \
             --device cuda would fit"
        )
        .into());
    }
    Ok(Ranks {
        own_rank: Some(launch.rank),
        local_rank: launch.local_rank,
        on_this_machine: launch.local_world_size,
        engine,
        world: World::processes(launch).engine(engine),
    })
}

fn check_size(started: usize, wanted: usize) -> Result<(), Error> {
    match started == wanted {
        true => Ok(()),
        false => Err(format!(
            "{started} ranks were started, but the layout has {wanted}: start {wanted}, or change \
             --tensor-parallel, --data-parallel or --pipeline-parallel"
        )
        .into()),
    }
}

/// A time in seconds, of a flag.
pub fn seconds(flag: &str, value: f64) -> Result<Duration, Error> {
    match value > 0.0 && value <= 1e9 {
        true => Ok(Duration::from_secs_f64(value)),
        false => {
            Err(format!("--{flag} {value} makes no sense; a number of seconds above 0 does").into())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_of_another_size_is_refused() {
        assert!(check_size(4, 4).is_ok());
        assert_eq!(
            check_size(2, 4).unwrap_err().to_string(),
            "2 ranks were started, but the layout has 4: start 4, or change --tensor-parallel, \
             --data-parallel or --pipeline-parallel"
        );
    }

    #[test]
    fn a_token_file_without_ranks_to_let_in_is_refused() {
        let error = with_token(None, Some(Path::new("x")))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("--token-file is about ranks that are processes"),
            "{error}"
        );
        assert!(with_token(None, None).unwrap().is_none());
    }

    #[test]
    fn times_are_checked() {
        assert_eq!(
            seconds("deadline", 2.5).unwrap(),
            Duration::from_millis(2500)
        );
        for value in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = seconds("silence", value).unwrap_err().to_string();
            assert!(error.starts_with("--silence "), "{error}");
        }
    }
}
