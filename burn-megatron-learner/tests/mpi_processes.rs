//! Ranks as processes, under mpirun: this test binary starts itself.

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use burn::tensor::DType;
use burn_megatron_learner::MegatronStrategy;
use tempfile::tempdir;

use crate::model::{ABORT_AT, Training, threads};

/// The variables with the folder of the run and with the epoch to resume from.
const FOLDER: &str = "BURN_MEGATRON_TEST_FOLDER";
const RESUME: &str = "BURN_MEGATRON_TEST_RESUME";

fn training() -> Training {
    Training {
        dtype: DType::F32,
        epochs: 4,
        saves: true,
        ..Training::default()
    }
}

/// Runs a rank, if mpirun has started it.
#[test]
#[ignore = "a rank of the other tests"]
fn rank() {
    let Ok(folder) = env::var(FOLDER) else {
        return;
    };
    let folder = Path::new(&folder);
    let resume = env::var(RESUME).ok().map(|epoch| epoch.parse().unwrap());
    let strategy = MegatronStrategy::from_env().unwrap();
    let is_main = strategy.is_main();
    // Only rank 1 aborts.
    if is_main {
        // SAFETY: the ranks have no threads yet that read the environment.
        unsafe { env::remove_var(ABORT_AT) };
    }
    let training = Training {
        resume,
        ..training()
    };
    let result = training.run(folder, Some(strategy));
    assert!(result.error.is_none(), "{}", result.error.unwrap());
    let name = format!("weights-{is_main}.json");
    let weights = serde_json::to_string(&result.model.weights()).unwrap();
    fs::write(folder.join(name), weights).unwrap();
}

fn mpirun(folder: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new("mpirun");
    command
        .args(["--oversubscribe", "--bind-to", "none", "-n", "2"])
        .arg(env::current_exe().unwrap())
        .args(["--exact", "mpi_processes::rank", "--ignored", "--nocapture"])
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("RUST_BACKTRACE", "0")
        .env(FOLDER, folder)
        .envs(variables.iter().copied())
        .stdin(Stdio::null());
    command.output().unwrap()
}

fn weights(folder: &Path, is_main: bool) -> Vec<f64> {
    let text = fs::read(folder.join(format!("weights-{is_main}.json"))).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A process is killed, and the run resumes from Burn's checkpoint.
#[test]
fn processes_are_killed_and_resumed_to_the_bits_of_threads() {
    let wanted = training().weights(Some(threads(2)));
    let folder = tempdir().unwrap();
    // There are two steps in an epoch.
    let killed = mpirun(folder.path(), &[(ABORT_AT, "7")]);
    assert!(!killed.status.success());
    let errors = text(&killed.stderr);
    assert!(errors.contains("rank 1 failed: its process"), "{errors}");
    let resumed = mpirun(folder.path(), &[(RESUME, "2")]);
    let output = text(&resumed.stdout);
    assert!(
        resumed.status.success(),
        "{output}\n{}",
        text(&resumed.stderr)
    );
    // Rank 1 is silent.
    assert_eq!(
        output.matches("Starting training for 4 epochs").count(),
        1,
        "{output}"
    );
    for is_main in [true, false] {
        assert_eq!(weights(folder.path(), is_main), wanted);
    }
}
