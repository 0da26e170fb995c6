//! Tests which launches can be started, and which are refused before anything is started.

use std::ffi::OsString;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use clap::Parser;

use super::{LaunchPlan, Starter};
use crate::launch::args::LaunchArgs;
use crate::launch::error::LaunchError;

#[derive(Parser)]
struct Call {
    #[command(flatten)]
    args: LaunchArgs,
}

fn plan_in(words: &str, variables: &[(&str, &str)]) -> Result<LaunchPlan, LaunchError> {
    let call = Call::try_parse_from(["launch"].into_iter().chain(words.split(' '))).unwrap();
    let variable = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| OsString::from(value))
    };
    LaunchPlan::new(&call.args, &variable)
}

fn refused(words: &str) -> String {
    let error = plan_in(words, &[]).unwrap_err();
    assert_eq!(error.exit_code(), 2, "{error}");
    error.to_string()
}

#[test]
fn the_device_chooses_the_engine() {
    for words in [
        "--ranks 2 -- pretrain --device cuda",
        "--ranks 2 -- pretrain --device=cuda --steps 3",
        "--ranks 2 --engine nccl -- pretrain",
    ] {
        let plan = plan_in(words, &[]).unwrap();
        assert!(
            matches!(plan.starter, Starter::Spawn { port: 0 }),
            "{plan:?}"
        );
    }
    // The plan needs mpirun, whether or not it is installed here.
    match plan_in("--ranks 2 -- pretrain --data cuda", &[]) {
        Ok(plan) => assert!(matches!(plan.starter, Starter::Mpirun { .. })),
        Err(error) => assert!(matches!(error, LaunchError::NoMpirun), "{error}"),
    }
}

#[test]
fn a_delay_of_restarts_needs_restarts() {
    let error = refused("--ranks 4 --engine nccl --restart-delay 5 -- pretrain");
    assert!(
        error.ends_with("add --max-restarts N, or remove --restart-delay"),
        "{error}"
    );
}

#[test]
fn a_plan_has_the_command_and_does_not_show_the_token() {
    let words = "--ranks 4 --engine nccl -- pretrain --steps 3";
    let token = "ab".repeat(32);
    let plan = plan_in(words, &[("BURN_MEGATRON_TOKEN", &token)]).unwrap();
    assert_eq!(plan.token.reveal(), token);
    assert!(!format!("{plan:?}").contains(&token));
    assert_eq!(plan.ranks, 4);
    assert_eq!(plan.command[1..], ["pretrain", "--steps", "3"]);
}

#[test]
fn mistakes_are_named_before_anything_starts() {
    let cases = [
        ("--ranks 0 -- x", "invalid --ranks 0: expected at least 1"),
        (
            "--ranks 1025 -- x",
            "invalid --ranks 1025: expected at most 1024 on one machine",
        ),
        (
            "--ranks 2 --engine mpi --master-port 4567 -- x",
            "--master-port requires --engine nccl, but this run has --engine mpi: remove it",
        ),
        (
            "--ranks 2 --engine nccl --mpirun-args -q -- x",
            "--mpirun-args requires --engine mpi, but this run has --engine nccl: remove it",
        ),
    ];
    for (words, message) in cases {
        assert_eq!(refused(words), message, "{words}");
    }
    assert!(
        refused("--ranks 2 --engine threads -- x")
            .starts_with("--engine threads conflicts with `launch`")
    );
}

#[test]
fn a_token_is_given_or_made() {
    let words = "--ranks 2 --engine nccl";
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let token = "cd".repeat(32);
    std::fs::write(&path, &token).unwrap();
    let with_file = format!("{words} --token-file {} -- x", path.display());
    let mode = |mode| std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let error = refused(&with_file);
    assert!(
        error.ends_with(&format!("chmod 600 {}", path.display())),
        "{error}"
    );
    mode(0o600);
    assert_eq!(plan_in(&with_file, &[]).unwrap().token.reveal(), token);
    let other = [("BURN_MEGATRON_TOKEN", &*"ef".repeat(32))];
    let error = plan_in(&with_file, &other).unwrap_err().to_string();
    assert!(error.contains("hold different tokens"), "{error}");
    let made = || plan_in("--ranks 2 --engine nccl -- x", &[]).unwrap().token;
    assert_ne!(made(), made());
}

#[test]
fn a_rank_cannot_start_ranks() {
    for variable in ["RANK", "BURN_MEGATRON_RENDEZVOUS", "OMPI_COMM_WORLD_RANK"] {
        let error = plan_in("--ranks 2 -- pretrain", &[(variable, "1")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{variable}=1 is set: this process is already a rank, and a rank cannot start ranks; run `launch` in \
                 another process, or unset {variable}"
            )
        );
        assert_eq!(error.exit_code(), 2);
    }
}

#[test]
fn a_port_that_is_taken_is_named() {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = refused(&format!(
        "--ranks 2 --engine nccl --master-port {port} -- x"
    ));
    let start = format!("the master port {port} is not free on this machine: ");
    assert!(error.starts_with(&start), "{error}");
    assert!(
        error.ends_with("; choose another with --master-port"),
        "{error}"
    );
}
