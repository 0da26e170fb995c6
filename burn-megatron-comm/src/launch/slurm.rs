//! What `srun` says about a task.

use super::error::LaunchError;
use super::node_list::{NodeList, TasksPerNode};
use super::seat::{Seat, agree, check_below};
use super::vars::{Number, Vars};

/// Slurm numbers the steps that `srun` starts up to here; above are the batch script, the shell of
/// `salloc` and others that are no tasks of ours.
const LAST_STEP: usize = 0xffff_fff0;

const CURE: &str = "srun sets both; pass all of SLURM_* on";

const NODE_LISTS: [&str; 3] = [
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_NODELIST",
];

/// Whether this process is a task that `srun` started. Under `sbatch` and `salloc`, `SLURM_PROCID` is 0
/// and `SLURM_NTASKS` is the size of the job before any task runs; but there is no `SLURM_STEP_ID`, or,
/// in the shell that newer versions of `salloc` start, one out of those that Slurm keeps for itself.
pub(super) fn is_task(vars: Vars) -> Result<bool, LaunchError> {
    let step = vars.number("SLURM_STEP_ID")?;
    Ok(step.is_some_and(|step| step.value <= LAST_STEP))
}

pub(super) fn seat(vars: Vars) -> Result<Seat, LaunchError> {
    let number = |names: &[&'static str]| vars.needed("SLURM_STEP_ID", names, CURE)?.number();
    let world_size = number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    Ok(Seat {
        rank: number(&["SLURM_PROCID"])?,
        local_rank: number(&["SLURM_LOCALID"])?,
        local_world_size: local_world_size(vars, &world_size)?,
        world_size,
    })
}

/// The tasks on this node.
fn local_world_size(vars: Vars, world_size: &Number) -> Result<Number, LaunchError> {
    let names = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let per_node = vars.needed("SLURM_STEP_ID", &names, CURE)?;
    let node = vars
        .needed("SLURM_STEP_ID", &["SLURM_NODEID"], CURE)?
        .number()?;
    let tasks = TasksPerNode::parse(&per_node.value).ok_or_else(|| LaunchError::Value {
        variable: per_node.to_string(),
        fits: "numbers of tasks such as 4(x2),3",
    })?;
    let said = |value| Number {
        value,
        from: per_node.to_string(),
    };
    agree("number of ranks", &said(tasks.total()), world_size)?;
    let nodes = Number {
        value: tasks.nodes(),
        from: format!("the number of nodes in {per_node}"),
    };
    check_below(&node, &nodes)?;
    Ok(Number {
        value: tasks.on(node.value).unwrap_or(0),
        from: format!("{per_node} at {}", node.from),
    })
}

/// The host of rank 0, which is the first of the step unless its hosts were given in another order
/// (`--distribution=arbitrary`; set `MASTER_ADDR` then).
pub(super) fn first_host(vars: Vars) -> Result<(String, String), LaunchError> {
    let list = vars.needed("SLURM_STEP_ID", &NODE_LISTS, CURE)?;
    let node_list = |source| LaunchError::NodeList {
        variable: list.to_string(),
        source,
    };
    let hosts = NodeList::parse(&list.value).map_err(node_list)?;
    let first = hosts.hosts().next().unwrap_or_default();
    Ok((first, list.to_string()))
}

/// `1234.0` from job and step, with the variables.
pub(super) fn job(vars: Vars) -> Result<(Number, Number), LaunchError> {
    let number = |name| vars.needed("SLURM_STEP_ID", &[name], CURE)?.number();
    Ok((number("SLURM_JOB_ID")?, number("SLURM_STEP_ID")?))
}
