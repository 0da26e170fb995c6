//! Where the ranks of a run are: threads of this process, or processes that a launcher started.

use std::time::Duration;

use burn_megatron::comm::{Engine, Launch, World, WorldError};
use burn_megatron::device::DeviceKind;
use burn_megatron::mesh::Mesh;

use crate::cli::PretrainArgs;
use crate::recipe::Error;

/// The world of a run, and the place of this process in it.
pub struct Ranks {
    /// All ranks.
    pub world: World,
    /// The rank that this process is; none where the ranks are its threads.
    pub own_rank: Option<usize>,
    /// Its number among those of its machine.
    pub local_rank: usize,
}

/// The ranks that the flags and the launcher's variables ask for, with the layout of `mesh`.
pub fn of(args: &PretrainArgs, mesh: &Mesh) -> Result<Ranks, Error> {
    let launch = Launch::from_env()?;
    let ranks = match (launch, args.engine) {
        (None, None | Some(Engine::Threads)) => threads(mesh)?,
        (None, Some(_)) => return Err(WorldError::NotLaunched.into()),
        (Some(launch), None | Some(Engine::Threads)) if launch.world_size == 1 => threads(mesh)?,
        (Some(launch), engine) => processes(launch, engine, args.device, mesh)?,
    };
    let world = ranks
        .world
        .deadline(seconds("deadline", args.deadline)?)
        .first_deadline(seconds("first-deadline", args.first_deadline)?)
        .silence(seconds("silence", args.silence)?);
    Ok(Ranks { world, ..ranks })
}

fn threads(mesh: &Mesh) -> Result<Ranks, Error> {
    Ok(Ranks {
        world: World::threads(mesh.world_size())?,
        own_rank: None,
        local_rank: 0,
    })
}

fn processes(
    launch: Launch,
    engine: Option<Engine>,
    device: DeviceKind,
    mesh: &Mesh,
) -> Result<Ranks, Error> {
    check_size(launch.world_size, mesh)?;
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
        world: World::processes(launch).engine(engine),
    })
}

fn check_size(started: usize, mesh: &Mesh) -> Result<(), Error> {
    let wanted = mesh.world_size();
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
    use burn_megatron::mesh::ParallelConfig;

    #[test]
    fn a_layout_of_another_size_is_refused() {
        let mesh = Mesh::new(&ParallelConfig::new().with_tensor(2).with_data(2), 4).unwrap();
        assert!(check_size(4, &mesh).is_ok());
        assert_eq!(
            check_size(2, &mesh).unwrap_err().to_string(),
            "2 ranks were started, but the layout has 4: start 4, or change --tensor-parallel, \
             --data-parallel or --pipeline-parallel"
        );
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
