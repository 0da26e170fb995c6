//! Runs the conformance suite on ranks that are processes.

use std::time::Duration;

use crate::processes::{Stage, run};

const PATIENCE: Duration = Duration::from_secs(300);

fn conforms(ranks: usize, programs: &str) {
    let stage = Stage::new("conformance");
    let mut command = stage.mpirun(ranks);
    let ended = run(
        command.args(["conformance", "--engine", "mpi", "--programs", programs]),
        PATIENCE,
    );
    assert_eq!(ended.code, Some(0), "{}", ended.all());
    let told = format!("cases pass on {ranks} ranks of mpi");
    assert!(ended.output.contains(&told), "{}", ended.all());
    stage.expect_nothing_left();
}

#[test]
fn one_rank() {
    conforms(1, "20");
}

#[test]
fn two_ranks() {
    conforms(2, "50");
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn three_ranks() {
    conforms(3, "50");
}

#[test]
fn four_ranks() {
    conforms(4, "200");
}

/// Checks that each of three ranks that call different collectives gets an error.
fn is_an_answer(kind: &str) {
    let stage = Stage::new("mismatch");
    let mut command = stage.mpirun(3);
    let flags = ["conformance", "--mismatch", kind, "--timeout", "20"];
    let ended = run(command.args(flags), PATIENCE);
    assert!(
        ended.output.contains("got: mismatch at"),
        "{kind}: {}",
        ended.all()
    );
    stage.expect_nothing_left();
}

#[test]
fn disagreements_are_answers() {
    ["operation", "message-length"]
        .into_iter()
        .for_each(is_an_answer);
}

#[test]
#[ignore = "slow: run by cargo xtask test --all"]
fn other_disagreements_are_answers() {
    ["type", "length", "root", "reduction"]
        .into_iter()
        .for_each(is_an_answer);
}
