//! The four numbers that say which rank a process is.

use super::address::is_loopback;
use super::error::LaunchError;
use super::vars::{Number, Vars};

/// Which rank a process is, among all and among those of its machine.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    pub rank: Number,
    pub world_size: Number,
    pub local_rank: Number,
    pub local_world_size: Number,
}

/// The names of torchrun, which our own launcher and people use as well.
const NAMES: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

const OPEN_MPI: [&str; 4] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
];

impl Seat {
    /// From the variables that torchrun and our own launcher set.
    pub fn of_launcher(vars: Vars) -> Result<Seat, LaunchError> {
        Seat::from_names(
            vars,
            NAMES,
            "the launcher sets all four of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; pass all \
             of them on",
        )
    }

    /// From OpenMPI's own variables.
    pub fn of_open_mpi(vars: Vars) -> Result<Seat, LaunchError> {
        Seat::from_names(
            vars,
            OPEN_MPI,
            "mpirun sets both; pass all of OMPI_COMM_WORLD_* on",
        )
    }

    /// From `RANK` and `WORLD_SIZE`. Where the ranks are known to meet on one machine, or nothing says
    /// where, they are all taken to be on it; else the local numbers are needed too.
    pub fn by_hand(vars: Vars) -> Result<Seat, LaunchError> {
        let cure = "a rank by hand needs both RANK and WORLD_SIZE";
        let rank = vars.needed("WORLD_SIZE", &["RANK"], cure)?.number()?;
        let world_size = vars.needed("RANK", &["WORLD_SIZE"], cure)?.number()?;
        let (local_rank, local_world_size) = match world_size.value == 1 || meet_here(vars) {
            true if !has_local(vars) => (on_one_machine(&rank), on_one_machine(&world_size)),
            _ => local_by_hand(vars)?,
        };
        Ok(Seat {
            rank,
            world_size,
            local_rank,
            local_world_size,
        })
    }

    fn from_names(
        vars: Vars,
        names: [&'static str; 4],
        cure: &'static str,
    ) -> Result<Seat, LaunchError> {
        let number = |name| vars.needed(names[0], &[name], cure)?.number();
        Ok(Seat {
            rank: number(names[0])?,
            world_size: number(names[1])?,
            local_rank: number(names[2])?,
            local_world_size: number(names[3])?,
        })
    }

    /// Checks that the numbers fit each other.
    pub fn check(self) -> Result<Seat, LaunchError> {
        for size in [&self.world_size, &self.local_world_size] {
            if size.value == 0 {
                return Err(LaunchError::Value {
                    variable: size.from.clone(),
                    fits: "1 rank or more",
                });
            }
        }
        check_below(&self.rank, &self.world_size)?;
        check_below(&self.local_rank, &self.local_world_size)?;
        let (local, world) = (&self.local_world_size, &self.world_size);
        match local.value <= world.value {
            true => Ok(self),
            false => Err(LaunchError::MoreThanAll {
                local: local.from.clone(),
                world: world.from.clone(),
                fits: world.value,
            }),
        }
    }

    /// Checks that what was set by hand says the same.
    pub fn agrees_with_hand(&self, vars: Vars) -> Result<(), LaunchError> {
        let own = [
            &self.rank,
            &self.world_size,
            &self.local_rank,
            &self.local_world_size,
        ];
        let what = [
            "rank",
            "number of ranks",
            "local rank",
            "number of local ranks",
        ];
        for ((name, own), what) in NAMES.into_iter().zip(own).zip(what) {
            if let Some(number) = vars.number(name)? {
                agree(what, &number, own)?;
            }
        }
        Ok(())
    }
}

fn has_local(vars: Vars) -> bool {
    vars.has("LOCAL_RANK") || vars.has("LOCAL_WORLD_SIZE")
}

/// Whether no other machine is named as the place to meet.
fn meet_here(vars: Vars) -> bool {
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

fn local_by_hand(vars: Vars) -> Result<(Number, Number), LaunchError> {
    let cure = "LOCAL_RANK counts the ranks of this machine from 0, LOCAL_WORLD_SIZE says how many they \
                are; set both";
    let beside = match has_local(vars) {
        true => "LOCAL_WORLD_SIZE",
        false => "MASTER_ADDR",
    };
    let rank = vars.needed(beside, &["LOCAL_RANK"], cure)?;
    let size = vars.needed("LOCAL_RANK", &["LOCAL_WORLD_SIZE"], cure)?;
    Ok((rank.number()?, size.number()?))
}

/// Checks that an index is below the number that it counts in.
pub(super) fn check_below(index: &Number, size: &Number) -> Result<(), LaunchError> {
    match index.value < size.value {
        true => Ok(()),
        false => Err(LaunchError::Outside {
            index: index.from.clone(),
            size: size.from.clone(),
            fits: size.value,
        }),
    }
}

/// Checks that two variables say the same.
pub(super) fn agree(
    what: &'static str,
    first: &Number,
    second: &Number,
) -> Result<(), LaunchError> {
    match first.value == second.value {
        true => Ok(()),
        false => Err(LaunchError::Disagree {
            what,
            first: first.from.clone(),
            second: second.from.clone(),
        }),
    }
}
