//! Every message, whole.

use super::recorded::{BY_HAND, OPEN_MPI, SLURM, TORCHRUN};
use super::*;

fn message(texts: &[&str]) -> String {
    read(texts).unwrap_err().to_string()
}

#[test]
fn a_rank_needs_a_size_and_a_size_a_rank() {
    let cure = "a rank by hand needs both RANK and WORLD_SIZE";
    assert_eq!(
        message(&["RANK=1"]),
        format!("RANK=1 is set, but WORLD_SIZE is not: {cure}")
    );
    let size = message(&["WORLD_SIZE=4"]);
    assert_eq!(
        size,
        format!("WORLD_SIZE=4 is set, but RANK is not: {cure}")
    );
    assert_eq!(
        message(&[TORCHRUN, "LOCAL_RANK"]),
        "RANK=3 is set, but LOCAL_RANK is not: the launcher sets all four of RANK, WORLD_SIZE, \
         LOCAL_RANK and LOCAL_WORLD_SIZE; pass all of them on"
    );
    assert_eq!(
        message(&[OPEN_MPI, "OMPI_COMM_WORLD_SIZE"]),
        "OMPI_COMM_WORLD_RANK=1 is set, but OMPI_COMM_WORLD_SIZE is not: mpirun sets both; pass all of \
         OMPI_COMM_WORLD_* on"
    );
    assert_eq!(
        message(&[SLURM, "SLURM_STEP_TASKS_PER_NODE\nSLURM_TASKS_PER_NODE"]),
        "SLURM_STEP_ID=2 is set, but SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not: srun \
         sets both; pass all of SLURM_* on"
    );
    assert_eq!(
        message(&["PMIX_RANK=2"]),
        "PMIX_RANK=2 is set, but the number of ranks is not: start the program with srun or OpenMPI's \
         mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
    );
}

#[test]
fn between_machines_the_local_numbers_are_needed() {
    let cure = "LOCAL_RANK counts the ranks of this machine from 0, LOCAL_WORLD_SIZE says how many they \
                are; set both";
    let neither = message(&[BY_HAND, "LOCAL_RANK\nLOCAL_WORLD_SIZE"]);
    let expected = format!("MASTER_ADDR=fd00::2 is set, but LOCAL_RANK is not: {cure}");
    assert_eq!(neither, expected);
    let rank = message(&[BY_HAND, "LOCAL_WORLD_SIZE"]);
    assert_eq!(
        rank,
        format!("LOCAL_RANK=0 is set, but LOCAL_WORLD_SIZE is not: {cure}")
    );
    let size = message(&[BY_HAND, "LOCAL_RANK"]);
    assert_eq!(
        size,
        format!("LOCAL_WORLD_SIZE=1 is set, but LOCAL_RANK is not: {cure}")
    );
}

#[test]
fn numbers_must_fit_each_other() {
    let by_hand = |change| message(&[BY_HAND, change]);
    assert_eq!(
        by_hand("RANK=2"),
        "RANK=2 is not below WORLD_SIZE=2: 0 to 1 would fit"
    );
    let local = "LOCAL_RANK=1 is not below LOCAL_WORLD_SIZE=1: only 0 would fit";
    assert_eq!(by_hand("LOCAL_RANK=1"), local);
    assert_eq!(
        by_hand("LOCAL_WORLD_SIZE=3"),
        "LOCAL_WORLD_SIZE=3 is more than WORLD_SIZE=2: at most 2 of its ranks can be on one machine"
    );
    assert_eq!(
        by_hand("WORLD_SIZE=0"),
        "WORLD_SIZE=0 cannot be read: 1 rank or more would fit"
    );
    assert_eq!(
        by_hand("LOCAL_WORLD_SIZE=0"),
        "LOCAL_WORLD_SIZE=0 cannot be read: 1 rank or more would fit"
    );
    assert_eq!(
        message(&[OPEN_MPI, "OMPI_COMM_WORLD_RANK=2"]),
        "OMPI_COMM_WORLD_RANK=2 is not below OMPI_COMM_WORLD_SIZE=2: 0 to 1 would fit"
    );
    assert_eq!(
        message(&[SLURM, "SLURM_LOCALID=4"]),
        "SLURM_LOCALID=4 is not below SLURM_STEP_TASKS_PER_NODE=4(x2),3 at SLURM_NODEID=1: 0 to 3 would \
         fit"
    );
    assert_eq!(
        message(&[SLURM, "SLURM_NODEID=3"]),
        "SLURM_NODEID=3 is not below the number of nodes in SLURM_STEP_TASKS_PER_NODE=4(x2),3: 0 to 2 \
         would fit"
    );
}

#[test]
fn numbers_are_whole() {
    for value in ["two", "-1", "+1", "1.0", "0x1", "99999999999999999999999"] {
        assert_eq!(
            message(&[BY_HAND, &format!("RANK={value}")]),
            format!("RANK={value} cannot be read: a whole number from 0 would fit")
        );
    }
    assert_eq!(
        message(&[SLURM, "SLURM_STEP_ID="]),
        "SLURM_STEP_ID=\"\" cannot be read: a whole number from 0 would fit"
    );
    assert_eq!(launch(&[BY_HAND, "RANK= 1 "]).rank, 1);
}

#[test]
fn launchers_must_agree() {
    let cure = "unset one of them, or make them equal";
    let disagree = |first: &str, second: &str, what: &str| {
        format!("{first} and {second} disagree about the {what}: {cure}")
    };
    assert_eq!(
        message(&[OPEN_MPI, "RANK=0\nWORLD_SIZE=2"]),
        disagree("RANK=0", "OMPI_COMM_WORLD_RANK=1", "rank")
    );
    assert_eq!(
        message(&[OPEN_MPI, "WORLD_SIZE=4"]),
        disagree("WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=2", "number of ranks")
    );
    assert_eq!(
        message(&[OPEN_MPI, "LOCAL_RANK=0"]),
        disagree("LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=1", "local rank")
    );
    assert_eq!(
        message(&[OPEN_MPI, "LOCAL_WORLD_SIZE=1"]),
        disagree(
            "LOCAL_WORLD_SIZE=1",
            "OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "number of local ranks"
        )
    );
    assert_eq!(
        message(&[SLURM, "RANK=0\nWORLD_SIZE=11"]),
        disagree("RANK=0", "SLURM_PROCID=6", "rank")
    );
    assert_eq!(
        message(&[SLURM, "PMIX_RANK=5"]),
        disagree("PMIX_RANK=5", "SLURM_PROCID=6", "rank")
    );
    assert_eq!(
        message(&[BY_HAND, "PMIX_RANK=0"]),
        disagree("RANK=1", "PMIX_RANK=0", "rank")
    );
    let per_node = "SLURM_STEP_TASKS_PER_NODE=4(x2)";
    assert_eq!(
        message(&[SLURM, per_node]),
        disagree(per_node, "SLURM_STEP_NUM_TASKS=11", "number of ranks")
    );
    let (whole, port) = ("BURN_MEGATRON_RENDEZVOUS=head:7", "BURN_MEGATRON_PORT=8");
    assert_eq!(
        message(&[SLURM, whole, port]),
        disagree(whole, port, "port of the rendezvous")
    );
}

#[test]
fn a_place_must_be_one() {
    let by_hand = |change: &str| message(&[BY_HAND, change]);
    assert_eq!(
        by_hand("MASTER_ADDR="),
        "MASTER_ADDR=\"\" is no address for the rendezvous: the host is empty; a name such as node1, or \
         an IP address, would fit"
    );
    let bare = message(&["RANK=0\nWORLD_SIZE=2\nMASTER_ADDR="]);
    assert_eq!(bare, by_hand("MASTER_ADDR="));
    for host in [
        "node 1",
        "http://node1",
        "256.0.0.1",
        "-node",
        "[node1]",
        "fd00::x",
    ] {
        assert_eq!(
            by_hand(&format!("MASTER_ADDR={host}")),
            format!(
                "MASTER_ADDR={host} is no address for the rendezvous: \"{host}\" is no host; a name of \
                 letters, digits, dots and hyphens, or an IP address, would fit"
            )
        );
    }
    for port in ["0", "65536", "http", "-1"] {
        for name in ["MASTER_PORT", "BURN_MEGATRON_PORT"] {
            assert_eq!(
                by_hand(&format!("{name}={port}")),
                format!(
                    "{name}={port} is no address for the rendezvous: \"{port}\" is no port; 1 to 65535 \
                     would fit"
                )
            );
        }
    }
    assert_eq!(
        message(&[TORCHRUN, "BURN_MEGATRON_RENDEZVOUS=fd00::1"]),
        "BURN_MEGATRON_RENDEZVOUS=fd00::1 is no address for the rendezvous: \"fd00::1\" names no port; \
         node1:29500 or [fd00::1]:29500 would fit"
    );
    assert_eq!(
        by_hand("MASTER_PORT"),
        "MASTER_ADDR=fd00::2 is set, but MASTER_PORT is not: set it to a port that is free on that host"
    );
    assert_eq!(
        by_hand("MASTER_ADDR"),
        "MASTER_PORT=29500 is set, but MASTER_ADDR is not: set it to the host of rank 0, or unset \
         MASTER_PORT"
    );
    assert_eq!(
        message(&[TORCHRUN, "MASTER_PORT=65535"]),
        "MASTER_PORT=65535 leaves no port above it for the rendezvous, as torchrun's agent listens on \
         that one itself: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    );
}

#[test]
fn slurms_short_forms_must_be_whole() {
    let nodes = |list: &str| message(&[SLURM, &format!("SLURM_STEP_NODELIST={list}")]);
    let begin = |list: &str| format!("SLURM_STEP_NODELIST={list} is no list of hosts");
    assert_eq!(
        nodes("node[1-2"),
        begin("node[1-2")
            + ": the brackets of \"node[1-2\" are not in pairs; node[01-04,07] would fit"
    );
    assert_eq!(
        nodes("node[2-1]"),
        begin("node[2-1]") + ": \"2-1\" is no range of numbers; 3, 3-7 or 03-07 would fit"
    );
    assert_eq!(
        nodes("node1,,node2"),
        begin("node1,,node2") + ": a host has no name; node1 or node[01-04,07],gpu3 would fit"
    );
    assert_eq!(
        nodes("no de"),
        "SLURM_STEP_NODELIST=no de is no address for the rendezvous: \"no de\" is no host; a name of \
         letters, digits, dots and hyphens, or an IP address, would fit"
    );
    for tasks in [
        "4(x2",
        "four",
        "",
        "4(x2),",
        "4x2",
        "9999999999(x9999999999)",
    ] {
        let variable = format!("SLURM_STEP_TASKS_PER_NODE={tasks}");
        let shown = if tasks.is_empty() {
            "SLURM_STEP_TASKS_PER_NODE=\"\""
        } else {
            &variable
        };
        assert_eq!(
            message(&[SLURM, &variable]),
            format!("{shown} cannot be read: numbers of tasks such as 4(x2),3 would fit")
        );
    }
}
