//! Tests of the complete message of every error.

use insta::assert_snapshot;

use super::recorded::{BY_HAND, OPEN_MPI, SLURM, TORCHRUN};
use super::*;

fn message(texts: &[&str]) -> String {
    read(texts).unwrap_err().to_string()
}

#[test]
fn a_rank_needs_a_size_and_a_size_a_rank() {
    let hint = "a rank that is started by hand requires both RANK and WORLD_SIZE";
    assert_eq!(
        message(&["RANK=1"]),
        format!("RANK=1 is set, but WORLD_SIZE is not: {hint}")
    );
    let size = message(&["WORLD_SIZE=4"]);
    assert_eq!(
        size,
        format!("WORLD_SIZE=4 is set, but RANK is not: {hint}")
    );
    assert_snapshot!(
        message(&[TORCHRUN, "LOCAL_RANK"]),
        @"RANK=3 is set, but LOCAL_RANK is not: the launcher sets all four of RANK, WORLD_SIZE, \
          LOCAL_RANK and LOCAL_WORLD_SIZE; pass all of them on"
    );
    assert_snapshot!(
        message(&[OPEN_MPI, "OMPI_COMM_WORLD_SIZE"]),
        @"OMPI_COMM_WORLD_RANK=1 is set, but OMPI_COMM_WORLD_SIZE is not: mpirun sets both; pass all of \
          OMPI_COMM_WORLD_* on"
    );
    assert_snapshot!(
        message(&[SLURM, "SLURM_STEP_TASKS_PER_NODE\nSLURM_TASKS_PER_NODE"]),
        @"SLURM_STEP_ID=2 is set, but SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE is not: srun \
          sets both; pass all of SLURM_* on"
    );
    assert_snapshot!(
        message(&["PMIX_RANK=2"]),
        @"PMIX_RANK=2 is set, but the number of ranks is not: start the program with srun or OpenMPI's \
          mpirun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
    );
}

#[test]
fn between_machines_the_local_numbers_are_needed() {
    let hint = "set both LOCAL_RANK, from 0 on each machine, and LOCAL_WORLD_SIZE, the number of ranks on \
                this machine";
    let neither = message(&[BY_HAND, "LOCAL_RANK\nLOCAL_WORLD_SIZE"]);
    let expected = format!("MASTER_ADDR=fd00::2 is set, but LOCAL_RANK is not: {hint}");
    assert_eq!(neither, expected);
    let rank = message(&[BY_HAND, "LOCAL_WORLD_SIZE"]);
    assert_eq!(
        rank,
        format!("LOCAL_RANK=0 is set, but LOCAL_WORLD_SIZE is not: {hint}")
    );
    let size = message(&[BY_HAND, "LOCAL_RANK"]);
    assert_eq!(
        size,
        format!("LOCAL_WORLD_SIZE=1 is set, but LOCAL_RANK is not: {hint}")
    );
}

#[test]
fn numbers_must_be_consistent() {
    let by_hand = |change| message(&[BY_HAND, change]);
    assert_snapshot!(by_hand("RANK=2"), @"invalid RANK=2: expected 0 to 1, below WORLD_SIZE=2");
    let local = "invalid LOCAL_RANK=1: expected 0, below LOCAL_WORLD_SIZE=1";
    assert_eq!(by_hand("LOCAL_RANK=1"), local);
    assert_snapshot!(
        by_hand("LOCAL_WORLD_SIZE=3"),
        @"invalid LOCAL_WORLD_SIZE=3: expected at most 2, as WORLD_SIZE=2"
    );
    assert_snapshot!(by_hand("WORLD_SIZE=0"), @"invalid WORLD_SIZE=0: expected at least 1 rank");
    assert_snapshot!(
        by_hand("LOCAL_WORLD_SIZE=0"),
        @"invalid LOCAL_WORLD_SIZE=0: expected at least 1 rank"
    );
    assert_snapshot!(
        message(&[OPEN_MPI, "OMPI_COMM_WORLD_RANK=2"]),
        @"invalid OMPI_COMM_WORLD_RANK=2: expected 0 to 1, below OMPI_COMM_WORLD_SIZE=2"
    );
    assert_snapshot!(
        message(&[SLURM, "SLURM_LOCALID=4"]),
        @"invalid SLURM_LOCALID=4: expected 0 to 3, below SLURM_STEP_TASKS_PER_NODE=4(x2),3 at \
          SLURM_NODEID=1"
    );
    assert_snapshot!(
        message(&[SLURM, "SLURM_NODEID=3"]),
        @"invalid SLURM_NODEID=3: expected 0 to 2, below the number of nodes in \
          SLURM_STEP_TASKS_PER_NODE=4(x2),3"
    );
}

#[test]
fn numbers_are_whole() {
    for value in ["two", "-1", "+1", "1.0", "0x1", "99999999999999999999999"] {
        assert_eq!(
            message(&[BY_HAND, &format!("RANK={value}")]),
            format!("invalid RANK={value}: expected a whole number")
        );
    }
    assert_snapshot!(
        message(&[SLURM, "SLURM_STEP_ID="]),
        @"invalid SLURM_STEP_ID=\"\": expected a whole number"
    );
    assert_eq!(launch(&[BY_HAND, "RANK= 1 "]).rank, 1);
}

#[test]
fn launchers_must_agree() {
    let hint = "unset one of them, or make them equal";
    let conflict = |first: &str, second: &str, what: &str| {
        format!("conflicting {what}: {first} and {second}; {hint}")
    };
    assert_eq!(
        message(&[OPEN_MPI, "RANK=0\nWORLD_SIZE=2"]),
        conflict("RANK=0", "OMPI_COMM_WORLD_RANK=1", "rank")
    );
    assert_eq!(
        message(&[OPEN_MPI, "WORLD_SIZE=4"]),
        conflict("WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=2", "number of ranks")
    );
    assert_eq!(
        message(&[OPEN_MPI, "LOCAL_RANK=0"]),
        conflict("LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_RANK=1", "local rank")
    );
    assert_eq!(
        message(&[OPEN_MPI, "LOCAL_WORLD_SIZE=1"]),
        conflict(
            "LOCAL_WORLD_SIZE=1",
            "OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "number of local ranks"
        )
    );
    assert_eq!(
        message(&[SLURM, "RANK=0\nWORLD_SIZE=11"]),
        conflict("RANK=0", "SLURM_PROCID=6", "rank")
    );
    assert_eq!(
        message(&[SLURM, "PMIX_RANK=5"]),
        conflict("PMIX_RANK=5", "SLURM_PROCID=6", "rank")
    );
    assert_eq!(
        message(&[BY_HAND, "PMIX_RANK=0"]),
        conflict("RANK=1", "PMIX_RANK=0", "rank")
    );
    let per_node = "SLURM_STEP_TASKS_PER_NODE=4(x2)";
    assert_eq!(
        message(&[SLURM, per_node]),
        conflict(per_node, "SLURM_STEP_NUM_TASKS=11", "number of ranks")
    );
    let (whole, port) = ("BURN_MEGATRON_RENDEZVOUS=head:7", "BURN_MEGATRON_PORT=8");
    assert_eq!(
        message(&[SLURM, whole, port]),
        conflict(whole, port, "port of the rendezvous")
    );
}

#[test]
fn an_address_must_be_valid() {
    let by_hand = |change: &str| message(&[BY_HAND, change]);
    assert_snapshot!(
        by_hand("MASTER_ADDR="),
        @"invalid rendezvous address MASTER_ADDR=\"\": the host is empty: expected a name such as node1, or \
          an IP address"
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
                "invalid rendezvous address MASTER_ADDR={host}: invalid host \"{host}\": expected a name of \
                 letters, digits, dots and hyphens, or an IP address"
            )
        );
    }
    for port in ["0", "65536", "http", "-1"] {
        for name in ["MASTER_PORT", "BURN_MEGATRON_PORT"] {
            assert_eq!(
                by_hand(&format!("{name}={port}")),
                format!(
                    "invalid rendezvous address {name}={port}: invalid port \"{port}\": expected 1 to 65535"
                )
            );
        }
    }
    assert_snapshot!(
        message(&[TORCHRUN, "BURN_MEGATRON_RENDEZVOUS=fd00::1"]),
        @"invalid rendezvous address BURN_MEGATRON_RENDEZVOUS=fd00::1: \"fd00::1\" has no port: expected an \
          address such as node1:29500 or [fd00::1]:29500"
    );
    assert_snapshot!(
        by_hand("MASTER_PORT"),
        @"MASTER_ADDR=fd00::2 is set, but MASTER_PORT is not: set it to a port that is free on that host"
    );
    assert_snapshot!(
        by_hand("MASTER_ADDR"),
        @"MASTER_PORT=29500 is set, but MASTER_ADDR is not: set it to the host of rank 0, or unset \
          MASTER_PORT"
    );
    assert_snapshot!(
        message(&[TORCHRUN, "MASTER_PORT=65535"]),
        @"MASTER_PORT=65535 leaves no port above it for the rendezvous, because torchrun's agent already listens on \
          MASTER_PORT=65535: give torchrun a port below 65535, or set BURN_MEGATRON_PORT"
    );
}

#[test]
fn slurms_formats_must_be_complete() {
    let nodes = |list: &str| message(&[SLURM, &format!("SLURM_STEP_NODELIST={list}")]);
    let begin = |list: &str| format!("invalid host list SLURM_STEP_NODELIST={list}");
    assert_eq!(
        nodes("node[1-2"),
        begin("node[1-2")
            + ": unbalanced brackets in \"node[1-2\": expected a list such as node[01-04,07]"
    );
    assert_eq!(
        nodes("node[2-1]"),
        begin("node[2-1]") + ": invalid range \"2-1\": expected a range such as 3, 3-7 or 03-07"
    );
    assert_eq!(
        nodes("node1,,node2"),
        begin("node1,,node2")
            + ": a host name is empty: expected a list such as node1 or node[01-04,07],gpu3"
    );
    assert_snapshot!(
        nodes("no de"),
        @"invalid rendezvous address SLURM_STEP_NODELIST=no de: invalid host \"no de\": expected a name of \
          letters, digits, dots and hyphens, or an IP address"
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
            format!("invalid {shown}: expected numbers of tasks such as 4(x2),3")
        );
    }
}
