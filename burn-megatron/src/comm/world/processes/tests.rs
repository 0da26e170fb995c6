//! What can be said without other processes; the rest is tested with real ones.

use super::*;

fn launch(launcher: Launcher) -> Launch {
    Launch {
        launcher,
        rank: 1,
        world_size: 4,
        local_rank: 1,
        local_world_size: 2,
        rendezvous: None,
        job: None,
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
