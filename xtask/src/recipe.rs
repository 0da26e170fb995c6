//! `cargo xtask recipe`: trains the default recipe, with ranks as threads and as processes, and runs the examples.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::metrics::{check_losses, losses, losses_in};
use crate::mpi;
use crate::own_model;
use crate::process::{cargo, run as run_command, target_folder};
use crate::report::{Outcome, Report};
use crate::temp::TempDir;
use crate::test;

const STEPS: usize = 8;

/// The program of the command.
const COMMAND: &str = "burn-megatron";

/// The examples. Each example checks its own results.
const EXAMPLES: [&str; 4] = ["bring_your_own", "experts", "pipeline_stages", "zero3"];

/// The profile of the programs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Profile {
    /// The release profile, as in the README.
    Release,
    /// The dev profile, with the build of the tests. A release build takes as long as all tests.
    Dev,
}

/// The built programs, which run in the repository.
pub struct Programs<'a> {
    root: &'a Path,
    folder: PathBuf,
}

impl Programs<'_> {
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    pub fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.file(name));
        command.current_dir(self.root);
        command
    }
}

/// Builds the command and the examples, trains the default recipe for a few steps in a temporary run folder and reads
/// its metrics, and runs the examples.
pub fn run(profile: Profile, root: &Path, report: &mut Report) {
    let mut built = Err(());
    report.step("programs", || {
        let programs = build(profile, root)?;
        built = Ok(programs);
        Ok::<_, String>(())
    });
    let Ok(programs) = &built else { return };
    report.step("recipe", || train(programs));
    report.step("recipe resumed", || resume(programs));
    report.step("recipe as processes", || match mpi::missing().as_slice() {
        [] => as_processes(programs).into(),
        missing => Outcome::Skipped(format!("missing: {}", missing.join(" and "))),
    });
    report.step("recipe of long sequences", || train_long(programs));
    for name in EXAMPLES {
        report.step(name, || run_command(&mut programs.command(name)));
    }
    report.step("conv_lm", || own_model::run(programs));
}

fn build(profile: Profile, root: &Path) -> Result<Programs<'_>, String> {
    let folder = match profile {
        Profile::Release => {
            build_release(root)?;
            "release"
        }
        Profile::Dev => {
            test::build_programs(root)?;
            "debug"
        }
    };
    let folder = target_folder(root)?.join(folder);
    Ok(Programs { root, folder })
}

/// Builds everything in one build: cargo rebuilds the library if the selected packages and features change.
fn build_release(root: &Path) -> Result<(), String> {
    let packages = [
        "build",
        "--release",
        "-p",
        "burn-megatron-cli",
        "-p",
        "burn-megatron-examples",
    ];
    let mut command = cargo(root, &packages);
    if mpi::missing().is_empty() {
        command.args(["--features", "burn-megatron-cli/mpi"]);
    }
    run_command(&mut command)
}

fn train(programs: &Programs) -> Result<(), String> {
    let mut folder = TempDir::new("recipe").map_err(|e| format!("a temporary folder: {e}"))?;
    let run_dir = folder.path().join("run");
    let result = train_in(programs, &run_dir);
    result.map_err(|reason| {
        folder.keep();
        format!("{reason}\nthe run folder is kept: {}", run_dir.display())
    })
}

/// Trains two steps on sequences that four ranks share. The sequences are a quarter as long as in the recipe.
fn train_long(programs: &Programs) -> Result<(), String> {
    let folder = TempDir::new("long").map_err(|e| format!("a temporary folder: {e}"))?;
    let shorter = [("context = 4096\n", "context = 1024\n")];
    let recipe = programs.root.join("examples/recipes/long.toml");
    let recipe = edited_recipe(&recipe, folder.path(), &shorter)?;
    let run_dir = folder.path().join("run");
    let mut command = programs.command(COMMAND);
    command
        .arg("pretrain")
        .arg("--recipe")
        .arg(&recipe)
        .args(["--steps", "2", "--global-batch-size", "1"])
        .arg("--run-dir")
        .arg(&run_dir);
    run_command(&mut command)?;
    let losses = losses_in(&run_dir)?;
    if losses.len() == 2 && losses.iter().all(|loss| loss.is_finite()) {
        return Ok(());
    }
    Err(format!("two steps of long sequences: {losses:?}"))
}

/// Writes a short version of the default recipe into `folder`, with less held-out text and a shorter sample.
/// Otherwise both take longer than a few steps.
fn short_recipe(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let shorter = [
        ("[train]\n", "[train]\nheld_out_samples = 4\n"),
        ("tokens = 300\n", "tokens = 8\n"),
    ];
    edited_recipe(&root.join("cli/src/tiny.toml"), folder, &shorter)
}

/// Writes a copy of a recipe into `folder`, and replaces the first text of each pair by the second.
fn edited_recipe(whole: &Path, folder: &Path, edits: &[(&str, &str)]) -> Result<PathBuf, String> {
    let failed = |path: &Path, error| format!("{}: {error}", path.display());
    let mut text = fs::read_to_string(whole).map_err(|error| failed(whole, error))?;
    for (from, to) in edits {
        if !text.contains(from) {
            return Err(format!("{} has no {from:?}", whole.display()));
        }
        text = text.replace(from, to);
    }
    let edited = folder.join(whole.file_name().unwrap_or_default());
    fs::write(&edited, text).map_err(|error| failed(&edited, error))?;
    Ok(edited)
}

/// Checks that a run resumed from a checkpoint is bit-equal in the same layout, and has close losses in another
/// layout.
fn resume(programs: &Programs) -> Result<(), String> {
    let folder = TempDir::new("resume").map_err(|e| format!("a temporary folder: {e}"))?;
    let recipe = short_recipe(programs.root, folder.path())?;
    let (steps, half) = (STEPS.to_string(), (STEPS / 2).to_string());
    let runs = folder.path();
    let run = |name: &str, layout: [&str; 6], flags: &[&str]| {
        let mut command = programs.command(COMMAND);
        let run_dir = runs.join(name);
        command
            .args(["pretrain", "--steps", &steps, "--recipe"])
            .arg(&recipe)
            .args(layout)
            .args(flags)
            .arg("--run-dir")
            .arg(&run_dir);
        run_command(&mut command)?;
        losses_in(&run_dir)
    };
    let layout = ["--tp", "2", "--dp", "2", "--pp", "1"];
    let whole = run(
        "whole",
        layout,
        &["--save-every", &half, "--checkpoint.asynchronous"],
    )?;
    check_losses(&whole, STEPS)?;
    let checkpoint = runs.join(format!("whole/checkpoints/step-{:08}", STEPS / 2));
    let checkpoint = checkpoint.to_string_lossy();
    let verify = ["checkpoint", "verify", &checkpoint];
    run_command(programs.command(COMMAND).args(verify))?;
    let from = ["--resume", &checkpoint];
    let same = run("same", layout, &from)?;
    if same[..] != whole[STEPS / 2..] {
        return Err(format!(
            "resumed under the same layout: {same:?}, not {whole:?}"
        ));
    }
    let sharded = [&from[..], &["--zero-stage", "2"]].concat();
    let other = run("other", ["--tp", "1", "--dp", "2", "--pp", "2"], &sharded)?;
    let is_near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-5 * b.abs();
    if other.len() != same.len() || !other.iter().zip(&same).all(is_near) {
        return Err(format!(
            "resumed under another layout: {other:?}, not {same:?}"
        ));
    }
    println!("resumed under the same layout: the same bits; under another one: {other:?}");
    Ok(())
}

/// Settings of FP8 layers. Their ranks also exchange maxima and quantized weights.
const IN_8_BITS: [&str; 7] = [
    "--precision",
    "bf16",
    "--fp8",
    "delayed",
    "--zero-stage",
    "1",
    "--data_parallel.fp8_param_gather",
];

/// Checks that four threads, four processes of the launcher and four processes of mpirun train the default recipe to
/// the same metrics, bit for bit. The check is repeated in FP8.
fn as_processes(programs: &Programs) -> Result<(), String> {
    same_metrics(programs, &[])?;
    same_metrics(programs, &IN_8_BITS)
}

fn same_metrics(programs: &Programs, flags: &[&str]) -> Result<(), String> {
    let folder = TempDir::new("processes").map_err(|e| format!("a temporary folder: {e}"))?;
    let recipe = short_recipe(programs.root, folder.path())?;
    let steps = STEPS.to_string();
    let metrics = |name: &str, mut command: Command| {
        let run_dir = folder.path().join(name);
        let layout = ["--tp", "2", "--dp", "2", "--pp", "1", "--steps", &steps];
        command.arg("pretrain").args(layout).args(flags);
        command.arg("--recipe").arg(&recipe);
        run_command(command.arg("--run-dir").arg(&run_dir))?;
        let metrics = run_dir.join("metrics.jsonl");
        fs::read_to_string(&metrics).map_err(|e| format!("{}: {e}", metrics.display()))
    };
    let mut launch = programs.command(COMMAND);
    launch.args(["launch", "--ranks", "4", "--"]);
    let mut mpirun = Command::new("mpirun");
    mpirun
        .current_dir(programs.root)
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .args(["-n", "4", "--oversubscribe", "--bind-to", "none"])
        .arg(programs.file(COMMAND));
    let threads = metrics("threads", programs.command(COMMAND))?;
    check_losses(&losses(&threads)?, STEPS)?;
    for (name, command) in [("launch", launch), ("mpirun", mpirun)] {
        if metrics(name, command)? != threads {
            return Err(format!(
                "four processes of {name} have other metrics than four threads"
            ));
        }
    }
    println!("four threads, and four processes of launch and of mpirun: the same bits {flags:?}");
    Ok(())
}

fn train_in(programs: &Programs, run_dir: &Path) -> Result<(), String> {
    let steps = STEPS.to_string();
    let args = ["pretrain", "--steps", &steps, "--run-dir"];
    run_command(programs.command(COMMAND).args(args).arg(run_dir))?;
    let losses = losses_in(run_dir)?;
    println!("losses: {losses:?}");
    check_losses(&losses, STEPS)
}
