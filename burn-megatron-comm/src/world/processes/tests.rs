//! Tests that require no other processes. Tests with real processes test the remaining cases.

use super::*;
use burn_megatron_rendezvous::Address;

fn launch(launcher: Launcher) -> Launch {
    Launch {
        launcher,
        rank: 1,
        world_size: 4,
        local_rank: 1,
        local_world_size: 2,
        rendezvous: None,
        job: None,
        token: None,
    }
}

#[test]
fn the_engine_threads_is_refused_for_processes() {
    let error = choose(Some(Engine::Threads), &launch(Launcher::Torchrun)).unwrap_err();
    insta::assert_snapshot!(
        error,
        @"the engine `threads` requires a single process, but each of the 4 ranks is a process: set the engine to nccl or mpi"
    );
}

#[test]
fn an_engine_that_is_not_compiled_in_names_its_feature() {
    for (engine, compiled, feature) in [
        (Engine::Nccl, cfg!(feature = "cuda"), "cuda"),
        (Engine::Mpi, cfg!(feature = "mpi"), "mpi"),
    ] {
        match choose(Some(engine), &launch(Launcher::Slurm)) {
            Ok(chosen) => assert!(compiled && chosen == engine),
            Err(error) => assert_eq!(
                error.to_string(),
                format!("the engine {engine} is not compiled in: build with --features {feature}")
            ),
        }
    }
}

#[test]
fn mpi_is_chosen_where_mpirun_started_the_ranks() {
    match choose(None, &launch(Launcher::OpenMpi)) {
        Ok(engine) => assert_eq!(engine, Engine::Mpi),
        Err(error) => assert!(error.to_string().contains("the engine mpi"), "{error}"),
    }
}

#[test]
fn an_engine_with_another_rank_is_refused() {
    let launch = launch(Launcher::Torchrun);
    assert!(check_mpi_rank(&launch, 1, 4).is_ok());
    let error = check_mpi_rank(&launch, 0, 1).unwrap_err().to_string();
    let wanted = "mpi: this process is rank 0 of 1 by MPI, but rank 1 of 4 by its environment variables (torchrun)";
    assert!(error.starts_with(wanted), "{error}");
}

#[test]
fn several_machines_need_a_token_and_one_uses_loopback() {
    let address = Address::new("192.0.2.7", 29500).unwrap();
    let spread = launch(Launcher::Torchrun);
    let error = addresses::rendezvous_addresses(&address, &spread)
        .unwrap_err()
        .to_string();
    let lines: Vec<_> = error
        .lines()
        .skip(1)
        .map(|line| line.trim_start())
        .collect();
    assert!(
        error.starts_with("the ranks are on several machines, which requires the same token"),
        "{error}"
    );
    assert!(
        lines[0].starts_with("(umask 077; openssl rand -hex 32 > run.token)")
            && lines[1].starts_with("export BURN_MEGATRON_TOKEN=$(cat run.token)"),
        "{error}"
    );
    let resolved = |launch: &Launch| addresses::rendezvous_addresses(&address, launch).unwrap();
    let here = Launch {
        local_world_size: 4,
        ..spread.clone()
    };
    assert_eq!(resolved(&here), ["127.0.0.1:29500".parse().unwrap()]);
    let token = Token::random().ok();
    let with_token = Launch { token, ..spread };
    assert_eq!(resolved(&with_token), ["192.0.2.7:29500".parse().unwrap()]);
}

#[test]
fn a_name_that_resolves_to_loopback_is_refused() {
    let address = Address::new("LOCALHOST", 29500).unwrap();
    let spread = Launch {
        token: Token::random().ok(),
        ..launch(Launcher::Slurm)
    };
    let error = addresses::rendezvous_addresses(&address, &spread)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("resolves to the loopback address"),
        "{error}"
    );
    // Two launchers on one machine.
    let loopback = Address::new("localhost", 29500).unwrap();
    assert!(addresses::rendezvous_addresses(&loopback, &spread).is_ok());
}

#[test]
fn an_address_of_another_machine_is_refused_with_those_of_this_one() {
    // The address is reserved for documentation, so no machine has it.
    let address = ["198.51.100.7:0".parse().unwrap()];
    let timeouts = RendezvousTimeouts {
        join: Duration::from_secs(1),
        heartbeat: Duration::from_secs(1),
    };
    let host = addresses::host_rendezvous(&address, 1, 0, Token::random().ok().as_ref(), timeouts);
    let error = host.unwrap_err().to_string();
    assert!(
        error.starts_with("cannot host the rendezvous at 198.51.100.7:0"),
        "{error}"
    );
}

#[test]
fn the_addresses_in_use_are_those_of_the_mpi_daemon() {
    let ips = |texts: &[&str]| -> Vec<std::net::IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    let own = ips(&["10.0.0.1", "172.17.0.1", "10.1.0.1"]);
    let daemon = "1949892608.0;tcp://10.0.0.1,10.1.0.1:45655;tcp6://[fd00::2]:60241";
    assert_eq!(
        addresses::in_use(&own, daemon),
        ips(&["10.0.0.1", "10.1.0.1"])
    );
    assert_eq!(addresses::in_use(&own, "7.0;tcp://10.9.0.1:5"), own);
    assert_eq!(addresses::in_use(&own, ""), own);
}

#[test]
fn one_process_reports_and_the_next_one_if_it_is_lost() {
    let reporters = |launched, lost| {
        (0..4)
            .filter(|rank| monitor::is_reporter(*rank, launched, lost))
            .collect()
    };
    let by: [Vec<usize>; 4] = [
        reporters(false, false),
        reporters(false, true),
        reporters(true, false),
        reporters(true, true),
    ];
    assert_eq!(by, [vec![0], vec![1], vec![], vec![0]]);
}

#[test]
fn exit_codes_distinguish_causes_from_consequences() {
    let failed = |source: AnyError| WorldError::RankFailed {
        rank: 2,
        message: "x".into(),
        source,
        positions: "y".into(),
        call_log: Err("z".into()),
        reported: true,
    };
    let peer = CommError::PeerFailed {
        rank: 2,
        message: "x".into(),
    };
    assert_eq!(failed(Box::new(peer)).exit_code(), 3);
    assert_eq!(failed("x".into()).exit_code(), 1);
    assert!(failed("x".into()).is_reported());
    let nowhere = RendezvousError::System("no".into());
    assert_eq!(WorldError::from(nowhere).exit_code(), 4);
    assert_eq!(WorldError::NotLaunched.exit_code(), 1);
}
