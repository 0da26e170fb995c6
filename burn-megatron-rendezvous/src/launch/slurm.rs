//! Reads the variables that `srun` sets for a task.

use super::error::LaunchEnvError;
use super::node_list::{self, TasksPerNode};
use super::rank_info::{RankInfo, check_below, check_equal};
use super::rendezvous::Job;
use super::vars::{Number, Vars};

/// The largest step id that `srun` uses. Slurm reserves larger ids for the batch script, the shell of `salloc` and
/// other steps.
const LAST_STEP: usize = 0xffff_fff0;

const HINT: &str = "srun sets both; pass all of SLURM_* on";

const NODE_LISTS: [&str; 3] = [
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_NODELIST",
];

/// Returns whether this process is a task that `srun` has started.
///
/// `sbatch` and `salloc` also set `SLURM_PROCID` to 0 and `SLURM_NTASKS` to the size of the job in processes that are
/// not tasks. In such a process, `SLURM_STEP_ID` is not set, or it is a reserved id in the shell of newer versions of
/// `salloc`.
pub(super) fn is_task(vars: Vars) -> Result<bool, LaunchEnvError> {
    let step = vars.number("SLURM_STEP_ID")?;
    Ok(step.is_some_and(|step| step.value <= LAST_STEP))
}

pub(super) fn rank_info(vars: Vars) -> Result<RankInfo, LaunchEnvError> {
    let number = |names: &[&'static str]| vars.needed("SLURM_STEP_ID", names, HINT)?.number();
    let world_size = number(&["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])?;
    Ok(RankInfo {
        rank: number(&["SLURM_PROCID"])?,
        local_rank: number(&["SLURM_LOCALID"])?,
        local_world_size: local_world_size(vars, &world_size)?,
        world_size,
    })
}

/// Returns the number of tasks on this node.
fn local_world_size(vars: Vars, world_size: &Number) -> Result<Number, LaunchEnvError> {
    let names = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let per_node = vars.needed("SLURM_STEP_ID", &names, HINT)?;
    let node = vars
        .needed("SLURM_STEP_ID", &["SLURM_NODEID"], HINT)?
        .number()?;
    let tasks = TasksPerNode::parse(&per_node.value).ok_or_else(|| LaunchEnvError::Value {
        variable: per_node.to_string(),
        expected: "numbers of tasks such as 4(x2),3",
    })?;
    let number = |value| Number {
        value,
        from: per_node.to_string(),
    };
    check_equal("number of ranks", &number(tasks.total()), world_size)?;
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

/// Returns the host of rank 0, which is the first host of the step. If `--distribution=arbitrary` changes the order of
/// the hosts, the user must set `MASTER_ADDR`.
pub(super) fn first_host(vars: Vars) -> Result<(String, String), LaunchEnvError> {
    let list = vars.needed("SLURM_STEP_ID", &NODE_LISTS, HINT)?;
    let wrong = |source| LaunchEnvError::NodeList {
        variable: list.to_string(),
        source,
    };
    let first = node_list::first_host(&list.value).map_err(wrong)?;
    Ok((first, list.to_string()))
}

/// Returns the id of the run, which consists of the job id and the step id.
pub(super) fn job(vars: Vars) -> Result<Job, LaunchEnvError> {
    let number = |name| vars.needed("SLURM_STEP_ID", &[name], HINT)?.number();
    let (job, step) = (number("SLURM_JOB_ID")?, number("SLURM_STEP_ID")?);
    Ok(Job {
        name: format!("{}.{}", job.value, step.value),
        // Consecutive steps of a job are 997 apart, so that they do not collide with the next jobs.
        number: (job.value as u64).wrapping_add((step.value as u64).wrapping_mul(997)),
        from: format!("{}, {}", job.from, step.from),
    })
}
