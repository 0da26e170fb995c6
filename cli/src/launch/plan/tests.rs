//! What can be started, and what is refused before anything is.

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
            matches!(&plan.starter, Starter::Spawn { host, port: 0 } if host == "127.0.0.1"),
            "{plan:?}"
        );
    }
    // Whether or not mpirun is here, it is what is looked for.
    match plan_in("--ranks 2 -- pretrain --data cuda", &[]) {
        Ok(plan) => assert!(matches!(plan.starter, Starter::Mpirun { .. })),
        Err(error) => assert!(matches!(error, LaunchError::NoMpirun), "{error}"),
    }
}

#[test]
fn a_machine_has_its_ranks_among_those_of_all() {
    let words = "--ranks 4 --engine nccl --nodes 3 --node-rank 2 --master-addr fe80::1 -- pretrain";
    let token = "ab".repeat(32);
    let plan = plan_in(words, &[("BURN_MEGATRON_TOKEN", &token)]).unwrap();
    assert_eq!(plan.token.reveal(), token);
    assert!(!format!("{plan:?}").contains(&token));
    assert_eq!((plan.first, plan.ranks, plan.world), (8, 4, 12));
    assert!(matches!(plan.starter, Starter::Spawn { host, port: 29500 } if host == "fe80::1"));
    assert_eq!(plan.command[1], "pretrain");
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
            "--ranks 2 --engine nccl --nodes 0 -- x",
            "invalid --nodes 0: expected at least 1",
        ),
        (
            "--ranks 2 --engine nccl --nodes 2 --node-rank 2 --master-addr a -- x",
            "invalid --node-rank 2 with --nodes 2: expected 0 to 1",
        ),
        (
            "--ranks 2 --engine nccl --node-rank 1 -- x",
            "invalid --node-rank 1 with --nodes 1: expected 0 to 0",
        ),
        (
            "--ranks 2 --engine nccl --nodes 2 -- x",
            "--nodes 2 needs --master-addr: the host of --node-rank 0, as the other machines reach it",
        ),
        (
            "--ranks 1000 --engine nccl --nodes 99999999 --master-addr a -- x",
            "--nodes 99999999 x --ranks 1000 are too many ranks: expected at most 16777216",
        ),
        (
            "--ranks 2 --engine nccl --master-addr a:1 -- x",
            "invalid --master-addr \"a:1\": expected a host name or an IP address, without a port",
        ),
        (
            "--ranks 2 --engine mpi --master-addr a -- x",
            "--master-addr applies to several machines, which --engine mpi gets from --hosts; give --hosts, or \
             remove it",
        ),
        (
            "--ranks 2 --engine mpi --nodes 2 -- x",
            "--nodes applies to --engine nccl only, and this run has --engine mpi; remove it; with mpi, --hosts \
             starts several machines",
        ),
        (
            "--ranks 2 --engine nccl --mpirun-args -q -- x",
            "--mpirun-args applies to --engine mpi only, and this run has --engine nccl; remove it",
        ),
        (
            "--ranks 2 --hosts a:2,:3 -- x",
            "invalid --hosts \"a:2,:3\": \":3\": expected name or name:ranks, as in a:2,b:2",
        ),
    ];
    for (words, message) in cases {
        assert_eq!(refused(words), message, "{words}");
    }
    assert!(
        refused("--ranks 2 --engine threads -- x")
            .starts_with("--engine threads needs no launcher")
    );
}

#[test]
fn several_machines_need_a_token_and_one_makes_it() {
    let words = "--ranks 2 --engine nccl --nodes 2 --node-rank 1 --master-addr a";
    let error = refused(&format!("{words} -- x"));
    assert!(
        error.starts_with("--nodes 2 needs a token, the same on each machine")
            && error.contains("\n  (umask 077; openssl rand -hex 32 > run.token)")
            && error.contains("\n  export BURN_MEGATRON_TOKEN=$(cat run.token)"),
        "{error}"
    );
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
fn the_rendezvous_is_at_an_address_of_this_machine() {
    // Reserved for documentation, so that no machine has it.
    let error =
        refused("--ranks 2 --engine nccl --master-addr 198.51.100.7 --master-port 4567 -- x");
    let start = "--master-addr 198.51.100.7 is not an address of this machine (";
    assert!(error.starts_with(start), "{error}");
}

#[test]
fn a_rank_cannot_start_ranks() {
    for variable in ["RANK", "BURN_MEGATRON_RENDEZVOUS", "OMPI_COMM_WORLD_RANK"] {
        let error = plan_in("--ranks 2 -- pretrain", &[(variable, "1")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "{variable}=1 is set: this process is a rank already, and a rank cannot start ranks; run `launch` \
                 outside of it, or unset {variable}"
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
