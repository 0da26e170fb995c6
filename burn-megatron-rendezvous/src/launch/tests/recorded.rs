//! Tests with recorded environment variables of the launchers.

use super::*;

/// The environment of torchrun 2.15 with two agents and `--rdzv-backend c10d`, in the second process of the second
/// agent.
pub const TORCHRUN: &str = "\
    GROUP_RANK=1
    GROUP_WORLD_SIZE=2
    LOCAL_RANK=1
    LOCAL_WORLD_SIZE=2
    MASTER_ADDR=localhost
    MASTER_PORT=40995
    OMP_NUM_THREADS=1
    RANK=3
    ROLE_NAME=default
    ROLE_RANK=3
    ROLE_WORLD_SIZE=4
    TORCHELASTIC_MAX_RESTARTS=0
    TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=job7
    TORCHELASTIC_USE_AGENT_STORE=True
    WORLD_SIZE=4";

/// The environment of OpenMPI 4.1.4 with `mpirun -n 2` on one machine, in the second process.
pub const OPEN_MPI: &str = "\
    OMPI_APP_CTX_NUM_PROCS=2
    OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1
    OMPI_COMM_WORLD_RANK=1
    OMPI_COMM_WORLD_SIZE=2
    OMPI_MCA_ess_base_jobid=1949892609
    OMPI_MCA_ess_base_vpid=1
    OMPI_UNIVERSE_SIZE=2
    PMIX_ID=1949892609.1
    PMIX_NAMESPACE=1949892609
    PMIX_RANK=1
    PMIX_VERSION=4.2.2rc2";

/// The environment of `srun` with 11 tasks on 3 nodes in a job with 4 nodes, in the third task of the second node.
pub const SLURM: &str = "\
    SLURM_JOB_ID=5816711
    SLURM_JOB_NODELIST=node[05-07],gpu3
    SLURM_LOCALID=2
    SLURM_NNODES=3
    SLURM_NODEID=1
    SLURM_NODELIST=node[05-07],gpu3
    SLURM_NPROCS=11
    SLURM_NTASKS=11
    SLURM_PROCID=6
    SLURM_STEPID=2
    SLURM_STEP_ID=2
    SLURM_STEP_NODELIST=node[06-07],gpu3
    SLURM_STEP_NUM_NODES=3
    SLURM_STEP_NUM_TASKS=11
    SLURM_STEP_TASKS_PER_NODE=4(x2),3
    SLURM_TASKS_PER_NODE=4(x2),3";

/// The variables that `srun --mpi=pmix` adds.
const PMIX: &str = "\
    PMIX_NAMESPACE=slurm.pmix.5816711.2
    PMIX_RANK=6
    PMIX_VERSION=4.2.9
    PMI_RANK=6
    PMI_SIZE=11";

/// The environment of the batch script of `sbatch` with 8 tasks.
const BATCH: &str = "\
    SLURM_JOB_ID=5816711
    SLURM_JOB_NODELIST=node[05-06]
    SLURM_LOCALID=0
    SLURM_NODEID=0
    SLURM_NPROCS=8
    SLURM_NTASKS=8
    SLURM_PROCID=0
    SLURM_TASKS_PER_NODE=4(x2)";

/// The variables that the shell of `salloc` adds. The shell is a reserved step of Slurm.
const INTERACTIVE: &str = "\
    PMIX_NAMESPACE=slurm.pmix.5816711.4294967290
    PMIX_RANK=0
    SLURM_STEPID=4294967290
    SLURM_STEP_ID=4294967290
    SLURM_STEP_NODELIST=node05
    SLURM_STEP_NUM_NODES=1
    SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1";

const OWN: &str = "\
    BURN_MEGATRON_RENDEZVOUS=127.0.0.1:41234
    RANK=2
    WORLD_SIZE=4
    LOCAL_RANK=2
    LOCAL_WORLD_SIZE=4
    BURN_MEGATRON_JOB_ID=19ac3f-77.1";

pub const BY_HAND: &str = "\
    RANK=1
    WORLD_SIZE=2
    LOCAL_RANK=0
    LOCAL_WORLD_SIZE=1
    MASTER_ADDR=fd00::2
    MASTER_PORT=29500";

fn expected(
    launcher: Launcher,
    [rank, world_size, local_rank, local_world_size]: [usize; 4],
    rendezvous: Option<&str>,
    job: Option<&str>,
) -> Launch {
    Launch {
        launcher,
        rank,
        world_size,
        local_rank,
        local_world_size,
        rendezvous: rendezvous.map(|text| text.parse().unwrap()),
        job: job.map(str::to_owned),
        token: None,
    }
}

#[test]
fn each_launcher_is_recognised() {
    use Launcher::*;
    let torchrun = expected(
        Torchrun,
        [3, 4, 1, 2],
        Some("localhost:40996"),
        Some("job7"),
    );
    assert_eq!(launch(&[TORCHRUN]), torchrun);
    // 15000 + 5816711 + 2 * 997, modulo 10000.
    let slurm = expected(
        Slurm,
        [6, 11, 2, 4],
        Some("node06:23705"),
        Some("5816711.2"),
    );
    assert_eq!(launch(&[SLURM]), slurm);
    let pmix = Launch {
        launcher: Pmix,
        ..slurm
    };
    assert_eq!(launch(&[SLURM, PMIX]), pmix);
    let own = expected(
        BurnMegatron,
        [2, 4, 2, 4],
        Some("127.0.0.1:41234"),
        Some("19ac3f-77.1"),
    );
    assert_eq!(launch(&[OWN]), own);
    let by_hand = expected(Manual, [1, 2, 0, 1], Some("[fd00::2]:29500"), None);
    assert_eq!(launch(&[BY_HAND]), by_hand);
    let mpi = launch(&[OPEN_MPI]);
    let address = mpi.rendezvous.clone().unwrap();
    assert_eq!(address.host, "127.0.0.1");
    assert!((15_000..25_000).contains(&address.port));
    let text = address.to_string();
    assert_eq!(
        mpi,
        expected(OpenMpi, [1, 2, 1, 2], Some(&text), Some("1949892609"))
    );
}

#[test]
fn without_a_launcher_ranks_are_threads() {
    assert_eq!(read(&[""]), Ok(None));
    assert_eq!(read(&[BATCH]), Ok(None));
    assert_eq!(read(&[BATCH, INTERACTIVE]), Ok(None));
    // An address without a rank does not describe a launch.
    let place = "MASTER_ADDR=node1\nMASTER_PORT=29500\nLOCAL_RANK=0\nBURN_MEGATRON_RENDEZVOUS=a:1";
    assert_eq!(read(&[place]), Ok(None));
}

#[test]
fn the_innermost_launcher_counts() {
    // One Slurm task per node runs a daemon of mpirun, which starts the ranks.
    let daemon = "SLURM_NTASKS=3\nSLURM_STEP_NUM_TASKS=3\nSLURM_PROCID=2";
    assert_eq!(launch(&[SLURM, daemon, OPEN_MPI]), launch(&[OPEN_MPI]));
    assert_eq!(launch(&[SLURM, daemon, TORCHRUN]), launch(&[TORCHRUN]));
    // mpirun starts one torchrun per node, which inherits the variables of mpirun.
    let node = "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=1\nPMIX_RANK=0";
    assert_eq!(launch(&[OPEN_MPI, node, TORCHRUN]), launch(&[TORCHRUN]));
    assert_eq!(launch(&[SLURM, OWN]), launch(&[OWN]));
    // mpirun runs in the script or the shell of a job.
    assert_eq!(launch(&[BATCH, OPEN_MPI]), launch(&[OPEN_MPI]));
    assert_eq!(launch(&[BATCH, INTERACTIVE, OPEN_MPI]), launch(&[OPEN_MPI]));
    // Manual launch in the shell of a job. The PMIx rank of the shell is not the rank of the process.
    let by_hand = launch(&[BATCH, INTERACTIVE, BY_HAND]);
    assert_eq!((by_hand.launcher, by_hand.rank), (Launcher::Manual, 1));
}

#[test]
fn variables_set_by_hand_may_be_equal() {
    let same = "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1";
    assert_eq!(launch(&[OPEN_MPI, same]), launch(&[OPEN_MPI]));
    let same = "RANK=6\nWORLD_SIZE=11\nLOCAL_RANK=2\nLOCAL_WORLD_SIZE=4";
    assert_eq!(launch(&[SLURM, same]), launch(&[SLURM]));
    let pmix = launch(&[BY_HAND, "PMIX_RANK=1"]);
    assert_eq!(pmix.launcher, Launcher::Manual);
}

#[test]
fn by_hand_the_local_numbers_may_be_left_out_on_one_machine() {
    for place in [
        "",
        "MASTER_ADDR=localhost\nMASTER_PORT=1",
        "MASTER_ADDR=127.0.1.1\nMASTER_PORT=1",
        "MASTER_ADDR=[::1]\nMASTER_PORT=1",
    ] {
        let (found, origins) = read(&["RANK=1\nWORLD_SIZE=3", place]).unwrap().unwrap();
        assert_eq!((found.local_rank, found.local_world_size), (1, 3));
        assert_eq!(origins.local_world_size, "WORLD_SIZE=3, all on one machine");
    }
    // Local variables are used if they are set.
    let set = launch(&[BY_HAND, "MASTER_ADDR=localhost"]);
    assert_eq!((set.local_rank, set.local_world_size), (0, 1));
    let alone = launch(&["RANK=0\nWORLD_SIZE=1\nMASTER_ADDR=node1\nMASTER_PORT=1"]);
    assert_eq!((alone.local_rank, alone.local_world_size), (0, 1));
}

#[test]
fn the_rendezvous_can_be_chosen() {
    let place = |texts: &[&str]| launch(texts).rendezvous.map(|address| address.to_string());
    for recorded in [TORCHRUN, SLURM, OPEN_MPI, BY_HAND] {
        let own = place(&[recorded, "BURN_MEGATRON_RENDEZVOUS=[::1]:7\nMASTER_PORT=9"]);
        assert_eq!(own.as_deref(), Some("[::1]:7"));
        let port = place(&[recorded, "BURN_MEGATRON_PORT=7\nMASTER_ADDR=head"]);
        assert_eq!(port.as_deref(), Some("head:7"));
    }
    let master = "MASTER_ADDR=head\nMASTER_PORT=9";
    for recorded in [SLURM, OPEN_MPI, BY_HAND] {
        assert_eq!(place(&[recorded, master]).as_deref(), Some("head:9"));
    }
    assert_eq!(
        place(&[SLURM, "MASTER_ADDR=head"]).as_deref(),
        Some("head:23705")
    );
    assert_eq!(
        place(&[SLURM, "MASTER_PORT=9"]).as_deref(),
        Some("node06:9")
    );
    assert_eq!(
        place(&[OPEN_MPI, "MASTER_PORT=9"]).as_deref(),
        Some("127.0.0.1:9")
    );
    let ipv6 = place(&[BY_HAND, "MASTER_ADDR=[fd00::7]"]);
    assert_eq!(ipv6.as_deref(), Some("[fd00::7]:29500"));
}

#[test]
fn torchruns_own_port_is_left_alone_only_where_its_agent_listens() {
    let place = |agent| launch(&[TORCHRUN, agent]).rendezvous.unwrap().port;
    assert_eq!(place("TORCHELASTIC_USE_AGENT_STORE=True"), 40_996);
    assert_eq!(place("TORCHELASTIC_USE_AGENT_STORE=False"), 40_995);
    assert_eq!(place("TORCHELASTIC_USE_AGENT_STORE"), 40_995);
    // The variable has no effect outside of torchrun.
    let by_hand = launch(&[BY_HAND, "TORCHELASTIC_USE_AGENT_STORE=True"]);
    assert_eq!(by_hand.rendezvous.unwrap().port, 29_500);
    assert_eq!(launch(&[TORCHRUN, "TORCHELASTIC_RUN_ID=none"]).job, None);
}

#[test]
fn runs_derive_ports_of_their_own() {
    let port = |texts: &[&str]| launch(texts).rendezvous.unwrap().port;
    let other = "PMIX_NAMESPACE=1949368321\nOMPI_MCA_ess_base_jobid=1949368321";
    assert_ne!(port(&[OPEN_MPI]), port(&[OPEN_MPI, other]));
    // The name without PMIx works too, and every rank derives the same port.
    assert_eq!(port(&[OPEN_MPI]), port(&[OPEN_MPI, "PMIX_NAMESPACE"]));
    let first = "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_LOCAL_RANK=0\nPMIX_RANK=0";
    assert_eq!(port(&[OPEN_MPI]), port(&[OPEN_MPI, first]));
    let mut ports: Vec<_> = (0..2000)
        .map(|step| port(&[SLURM, &format!("SLURM_STEP_ID={step}")]))
        .collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 2000);
    assert!((15_000..25_000).contains(&ports[0]) && ports[1999] < 25_000);
    assert_ne!(port(&[SLURM]), port(&[SLURM, "SLURM_JOB_ID=5816712"]));
}

#[test]
fn mpi_over_machines_has_no_address() {
    let two = "OMPI_COMM_WORLD_LOCAL_SIZE=1\nOMPI_COMM_WORLD_LOCAL_RANK=0";
    assert_eq!(launch(&[OPEN_MPI, two]).rendezvous, None);
    assert_eq!(
        launch(&[OPEN_MPI, two, "BURN_MEGATRON_PORT=7"]).rendezvous,
        None
    );
    let head = launch(&[OPEN_MPI, two, "MASTER_ADDR=head"])
        .rendezvous
        .unwrap();
    assert_eq!(head.host, "head");
    assert_eq!(head.port, launch(&[OPEN_MPI]).rendezvous.unwrap().port);
}

#[test]
fn origins_name_the_variables() {
    let (_, origins) = read(&[SLURM]).unwrap().unwrap();
    assert_eq!(origins.rank, "SLURM_PROCID=6");
    assert_eq!(origins.world_size, "SLURM_STEP_NUM_TASKS=11");
    assert_eq!(origins.local_rank, "SLURM_LOCALID=2");
    let local = "SLURM_STEP_TASKS_PER_NODE=4(x2),3 at SLURM_NODEID=1";
    assert_eq!(origins.local_world_size, local);
    let place = "SLURM_STEP_NODELIST=node[06-07],gpu3, SLURM_JOB_ID=5816711, SLURM_STEP_ID=2";
    assert_eq!(origins.rendezvous.as_deref(), Some(place));
    let (_, origins) = read(&[TORCHRUN]).unwrap().unwrap();
    let place = "MASTER_ADDR=localhost, MASTER_PORT=40995 + 1 as TORCHELASTIC_USE_AGENT_STORE=True";
    assert_eq!(origins.rendezvous.as_deref(), Some(place));
    assert_eq!(origins.job.as_deref(), Some("TORCHELASTIC_RUN_ID=job7"));
}

#[test]
fn older_slurm_has_fewer_names() {
    let older = "SLURM_STEP_NUM_TASKS\nSLURM_STEP_TASKS_PER_NODE\nSLURM_STEP_NODELIST";
    let found = launch(&[SLURM, older]);
    assert_eq!((found.world_size, found.local_world_size), (11, 4));
    assert_eq!(found.rendezvous.unwrap().host, "node05");
}

#[test]
fn a_launch_is_serialized_as_json() {
    let json = serde_json::to_value(launch(&[BY_HAND])).unwrap();
    assert_eq!(json["launcher"], "manual");
    assert_eq!(json["rendezvous"], "[fd00::2]:29500");
}

#[test]
fn the_token_is_read_and_never_shown() {
    const TOKEN: &str = "BURN_MEGATRON_TOKEN=\
        00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let (launch, origins) = read(&[SLURM, TOKEN]).unwrap().unwrap();
    let token = launch.token.as_ref().unwrap();
    assert!(TOKEN.ends_with(&token.reveal()));
    assert_eq!(origins.token.as_deref(), Some("BURN_MEGATRON_TOKEN"));
    let shown = format!("{launch:?} {origins:?}");
    let shown = shown + &serde_json::to_string(&(&launch, &origins)).unwrap();
    assert!(!shown.contains("00112233"), "{shown}");
    let error = read(&[SLURM, "BURN_MEGATRON_TOKEN=secret"])
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("invalid token in BURN_MEGATRON_TOKEN (6 characters)"),
        "{error}"
    );
    assert!(!error.contains("secret"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_token_file_gives_the_token_and_may_not_contradict() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let token = "ab".repeat(32);
    std::fs::write(&path, &token).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    let found = launch(&[SLURM]).with_token_file(&path).unwrap();
    assert_eq!(found.token.as_ref().unwrap().reveal(), token);
    assert!(found.with_token_file(&path).is_ok());
    let other = format!("BURN_MEGATRON_TOKEN={}", "cd".repeat(32));
    let error = launch(&[SLURM, &other]).with_token_file(&path).unwrap_err();
    assert!(
        error.to_string().contains("hold different tokens"),
        "{error}"
    );
}
