//! What can be said without other processes; the rest is tested with real ones.

use super::*;
use crate::auth::Token;
use crate::launch::Address;

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
fn threads_join_no_processes() {
    let error = choose(Some(Engine::Threads), &launch(Launcher::Torchrun)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "4 ranks were started as processes, and the engine threads joins the threads of one; leave \
         it out, or start one process"
    );
}

#[test]
fn an_engine_that_was_left_out_names_its_feature() {
    for (engine, compiled, feature) in [
        (Engine::Nccl, cfg!(feature = "cuda"), "cuda"),
        (Engine::Mpi, cfg!(feature = "mpi"), "mpi"),
    ] {
        match choose(Some(engine), &launch(Launcher::Slurm)) {
            Ok(chosen) => assert!(compiled && chosen == engine),
            Err(error) => assert_eq!(
                error.to_string(),
                format!(
                    "this binary was built without the engine {engine}; build it with --features \
                     {feature}"
                )
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
fn an_engine_that_means_another_rank_is_refused() {
    let launch = launch(Launcher::Torchrun);
    assert!(check_place(&launch, 1, 4).is_ok());
    let error = check_place(&launch, 0, 1).unwrap_err().to_string();
    let wanted =
        "mpi: MPI takes this process for rank 0 of 1, the variables (torchrun) for rank 1 of 4";
    assert!(error.starts_with(wanted), "{error}");
}

#[test]
fn several_machines_need_a_token_and_one_stays_by_itself() {
    let place = Address::new("192.0.2.7", 29500).unwrap();
    let spread = launch(Launcher::Torchrun);
    let error = place::meeting_place(&place, &spread)
        .unwrap_err()
        .to_string();
    let lines: Vec<_> = error
        .lines()
        .skip(1)
        .map(|line| line.trim_start())
        .collect();
    assert!(
        error.starts_with("the ranks are on several machines"),
        "{error}"
    );
    assert!(
        lines[0].starts_with("(umask 077; openssl rand -hex 32 > run.token)")
            && lines[1].starts_with("export BURN_MEGATRON_TOKEN=$(cat run.token)"),
        "{error}"
    );
    let meet = |launch: &Launch| place::meeting_place(&place, launch).unwrap();
    let here = Launch {
        local_world_size: 4,
        ..spread.clone()
    };
    assert_eq!(meet(&here), ["127.0.0.1:29500".parse().unwrap()]);
    let token = Token::random().ok();
    let known = Launch { token, ..spread };
    assert_eq!(meet(&known), ["192.0.2.7:29500".parse().unwrap()]);
}

#[test]
fn a_name_that_no_other_machine_reaches_is_refused() {
    let place = Address::new("LOCALHOST", 29500).unwrap();
    let spread = Launch {
        token: Token::random().ok(),
        ..launch(Launcher::Slurm)
    };
    let error = place::meeting_place(&place, &spread)
        .unwrap_err()
        .to_string();
    assert!(error.contains("which no other reaches"), "{error}");
    // Two launchers on one machine, as somebody tries it out.
    let meant = Address::new("localhost", 29500).unwrap();
    assert!(place::meeting_place(&meant, &spread).is_ok());
}

#[test]
fn an_address_of_another_machine_is_refused_with_those_of_this_one() {
    // Reserved for documentation, so that no machine has it.
    let there = ["198.51.100.7:0".parse().unwrap()];
    let patience = Patience {
        gather: Duration::from_secs(1),
        silence: Duration::from_secs(1),
    };
    let held = place::hold(&there, 1, 0, Token::random().ok().as_ref(), patience);
    let error = held.unwrap_err().to_string();
    assert!(
        error.starts_with("the rendezvous cannot be held at 198.51.100.7:0"),
        "{error}"
    );
}

#[test]
fn mpi_says_which_interfaces_are_in_use() {
    let ips = |texts: &[&str]| -> Vec<std::net::IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    let own = ips(&["10.0.0.1", "172.17.0.1", "10.1.0.1"]);
    let daemon = "1949892608.0;tcp://10.0.0.1,10.1.0.1:45655;tcp6://[fd00::2]:60241";
    assert_eq!(place::in_use(&own, daemon), ips(&["10.0.0.1", "10.1.0.1"]));
    assert_eq!(place::in_use(&own, "7.0;tcp://10.9.0.1:5"), own);
    assert_eq!(place::in_use(&own, ""), own);
}

#[test]
fn one_process_tells_and_the_next_one_if_that_is_gone() {
    let told = |launched, lost| {
        (0..4)
            .filter(|rank| watch::tells(*rank, launched, lost))
            .collect()
    };
    let by: [Vec<usize>; 4] = [
        told(false, false),
        told(false, true),
        told(true, false),
        told(true, true),
    ];
    assert_eq!(by, [vec![0], vec![1], vec![], vec![0]]);
}

#[test]
fn exit_codes_tell_causes_from_consequences() {
    let failed = |source: AnyError| WorldError::RankFailed {
        rank: 2,
        message: "x".into(),
        source,
        verdict: "y".into(),
        call_log: Err("z".into()),
        told: true,
    };
    let peer = CommError::PeerFailed {
        rank: 2,
        message: "x".into(),
    };
    assert_eq!(failed(Box::new(peer)).exit_code(), 3);
    assert_eq!(failed("x".into()).exit_code(), 1);
    assert!(failed("x".into()).is_told());
    let nowhere = RendezvousError::System("no".into());
    assert_eq!(WorldError::from(nowhere).exit_code(), 4);
    assert_eq!(WorldError::NotLaunched.exit_code(), 1);
}
