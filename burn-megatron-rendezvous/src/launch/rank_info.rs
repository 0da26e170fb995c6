//! The rank, the world size, the local rank and the local world size of a process.

use super::address::is_loopback;
use super::error::LaunchEnvError;
use super::vars::{Number, Vars};

/// The rank and the number of ranks, both in the world and on this machine.
#[derive(Clone, Debug)]
pub(super) struct RankInfo {
    pub rank: Number,
    pub world_size: Number,
    pub local_rank: Number,
    pub local_world_size: Number,
}

/// The variables that torchrun sets. `burn-megatron launch` and manual launches use the same names.
const NAMES: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

const OPEN_MPI: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];

impl RankInfo {
    /// Reads the variables that torchrun or `burn-megatron launch` sets.
    pub fn of_launcher(vars: Vars) -> Result<RankInfo, LaunchEnvError> {
        let hint = "the launcher sets all four of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; pass all \
                    of them on";
        RankInfo::from_names(vars, NAMES, hint)
    }

    /// Reads the variables that OpenMPI sets.
    pub fn of_open_mpi(vars: Vars) -> Result<RankInfo, LaunchEnvError> {
        let hint = "mpirun sets both; pass all of OMPI_COMM_WORLD_* on";
        RankInfo::from_names(vars, OPEN_MPI, hint)
    }

    /// Reads `RANK` and `WORLD_SIZE`, which were set by hand. If `MASTER_ADDR` is a loopback address or not set, all
    /// ranks are on one machine and the local variables may be omitted. Otherwise, the local variables are required if
    /// there are several ranks.
    pub fn by_hand(vars: Vars) -> Result<RankInfo, LaunchEnvError> {
        let hint = "a rank that is started by hand requires both RANK and WORLD_SIZE";
        let rank = vars.needed("WORLD_SIZE", &["RANK"], hint)?.number()?;
        let world_size = vars.needed("RANK", &["WORLD_SIZE"], hint)?.number()?;
        let is_one_machine = world_size.value == 1 || is_local_rendezvous(vars);
        let (local_rank, local_world_size) = if is_one_machine && !has_local(vars) {
            (on_one_machine(&rank), on_one_machine(&world_size))
        } else {
            local_by_hand(vars)?
        };
        Ok(RankInfo {
            rank,
            world_size,
            local_rank,
            local_world_size,
        })
    }

    fn from_names(
        vars: Vars,
        names: [&'static str; 4],
        hint: &'static str,
    ) -> Result<RankInfo, LaunchEnvError> {
        let number = |name| vars.needed(names[0], &[name], hint)?.number();
        Ok(RankInfo {
            rank: number(names[0])?,
            world_size: number(names[1])?,
            local_rank: number(names[2])?,
            local_world_size: number(names[3])?,
        })
    }

    /// Checks that the values are consistent.
    pub fn check(self) -> Result<RankInfo, LaunchEnvError> {
        for size in [&self.world_size, &self.local_world_size] {
            if size.value == 0 {
                return Err(LaunchEnvError::Value {
                    variable: size.from.clone(),
                    expected: "at least 1 rank",
                });
            }
        }
        check_below(&self.rank, &self.world_size)?;
        check_below(&self.local_rank, &self.local_world_size)?;
        let (local, world) = (&self.local_world_size, &self.world_size);
        if local.value > world.value {
            return Err(LaunchEnvError::TooManyLocalRanks {
                local: local.from.clone(),
                world: world.from.clone(),
                limit: world.value,
            });
        }
        Ok(self)
    }

    /// Checks that variables that were set by hand have the same values.
    pub fn check_by_hand(&self, vars: Vars) -> Result<(), LaunchEnvError> {
        let expected = [
            ("rank", &self.rank),
            ("number of ranks", &self.world_size),
            ("local rank", &self.local_rank),
            ("number of local ranks", &self.local_world_size),
        ];
        for (name, (what, own)) in NAMES.into_iter().zip(expected) {
            if let Some(number) = vars.number(name)? {
                check_equal(what, &number, own)?;
            }
        }
        Ok(())
    }
}

fn has_local(vars: Vars) -> bool {
    vars.has("LOCAL_RANK") || vars.has("LOCAL_WORLD_SIZE")
}

/// Returns whether `MASTER_ADDR` is a loopback address or not set.
fn is_local_rendezvous(vars: Vars) -> bool {
    vars.get("MASTER_ADDR").is_none_or(|given| {
        let host = given.value.trim_matches(['[', ']']);
        host.is_empty() || is_loopback(host)
    })
}

fn on_one_machine(number: &Number) -> Number {
    Number {
        value: number.value,
        from: format!("{}, all on one machine", number.from),
    }
}

fn local_by_hand(vars: Vars) -> Result<(Number, Number), LaunchEnvError> {
    let hint = "set both LOCAL_RANK, from 0 on each machine, and LOCAL_WORLD_SIZE, the number of ranks on \
                this machine";
    let beside = if has_local(vars) {
        "LOCAL_WORLD_SIZE"
    } else {
        "MASTER_ADDR"
    };
    let rank = vars.needed(beside, &["LOCAL_RANK"], hint)?;
    let size = vars.needed("LOCAL_RANK", &["LOCAL_WORLD_SIZE"], hint)?;
    Ok((rank.number()?, size.number()?))
}

/// Checks that an index is less than its size.
pub(super) fn check_below(index: &Number, size: &Number) -> Result<(), LaunchEnvError> {
    if index.value < size.value {
        return Ok(());
    }
    Err(LaunchEnvError::OutOfRange {
        index: index.from.clone(),
        size: size.from.clone(),
        limit: size.value,
    })
}

/// Checks that two variables have equal values.
pub(super) fn check_equal(
    what: &'static str,
    first: &Number,
    second: &Number,
) -> Result<(), LaunchEnvError> {
    if first.value == second.value {
        return Ok(());
    }
    Err(LaunchEnvError::Conflict {
        what,
        first: first.from.clone(),
        second: second.from.clone(),
    })
}
