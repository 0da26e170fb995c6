//! `cargo xtask`: the checks of this repository.

mod apt;
mod binaries;
mod blas;
mod book;
mod check;
mod check_cuda;
mod check_nccl;
mod circles;
mod differences;
#[cfg(unix)]
mod docs_commands;
mod draw;
mod emulate;
#[cfg(unix)]
mod first_hour;
mod fuzz_layouts;
mod golden;
mod gpu;
mod gpu_kit;
mod lines;
mod metrics;
mod minutes;
mod mpi;
mod order;
mod own_model;
mod peers;
mod pip;
mod plan_all;
mod process;
mod recipe;
mod report;
mod settings;
#[cfg(unix)]
mod soak;
mod temp;
mod test;
mod totals;
mod vulkan;
mod wheels;
mod words;
mod workflows;

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use check::Check;
use check_cuda::{Compilers, Options};
use report::{Outcome, Report};
use test::Extent;

/// The checks of this repository.
///
/// All steps run, even if an earlier step fails. A table at the end lists all steps. The exit status is non-zero if a
/// step failed.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the tests, including the tests on a GPU device if a driver is available.
    ///
    /// Without `--all`, tests that are marked as slow are skipped.
    ///
    /// The command first looks for a Vulkan driver and its loader. On Debian and Ubuntu, as root, it installs missing
    /// packages with apt-get (mesa-vulkan-drivers and libvulkan1: Vulkan on the CPU). On other systems it prints how
    /// to install them and how many tests are skipped. macOS and Windows need neither.
    ///
    /// It does the same for OpenBLAS (libopenblas0-pthread), which is used to test matrix products on the CPU.
    ///
    /// It also does the same for MPI (mpicc, mpirun and libclang; libopenmpi-dev, openmpi-bin, libclang-dev and
    /// iproute2 with apt-get). MPI runs ranks as processes.
    ///
    /// It then builds the tests of all crates in one build and runs them. The features `mpi` and `wgpu` are enabled
    /// if they can run.
    ///
    /// The output lists the ten slowest tests, and each failed test with the first lines of its output. The last line
    /// is "N passed, N failed, N skipped". Skipped tests are slow tests, tests that need a missing driver or MPI, and
    /// tests that lack something at run time, such as root rights. Tests of the last kind are listed with the reason.
    /// A test binary that aborts counts as one failed test, and so does a step that does not compile.
    Test {
        /// Run slow tests too, as `ci` does.
        #[arg(long)]
        all: bool,
    },
    /// Check the source: format, retired words, order, names of settings, lint, documentation, the CUDA build, the
    /// small build, the packages.
    Check {
        /// Check to run.
        #[arg(value_enum, default_value = "all")]
        check: Check,
        /// With `words`: print every sentence with a marker for text that is hard to read, with its file and line.
        #[arg(long)]
        list: bool,
    },
    /// Compile every CUDA kernel to machine code, without a GPU, and check it.
    ///
    /// Compiles each kernel for A100 (sm_80), H100 and H200 (sm_90a) and B200 (sm_100a). The table lists registers,
    /// spilled bytes (stored/loaded), local memory (stack) and shared memory in bytes. It also lists the number of
    /// global memory loads and stores by width in bits. The check fails if a kernel does not compile, spills, or
    /// needs more shared memory than the device has. It also fails if a kernel that streams rows does not use 128-bit
    /// accesses.
    ///
    /// Needs NVIDIA's compilers in the folder CUDA_WHEELS, or in cuda-wheels in the target folder if CUDA_WHEELS is
    /// not set. Missing compilers are installed there with pip (about 330 MB). On Debian and Ubuntu, as root, a
    /// missing pip is installed with apt-get.
    CheckCuda(Options),
    /// Check the NCCL engine against NCCL 2.18 and 2.30, without a GPU.
    ///
    /// The functions, layouts and numbers of each header are checked by assertions, which the system's C compiler
    /// (cc) compiles. Each library is checked for its functions, its version, unique ids, and the error of a
    /// communicator without a GPU. Headers and libraries come from NVIDIA's wheels, which are installed with pip in
    /// nccl-wheels in the target folder (about 500 MB). Needs Linux. Not part of `ci`.
    CheckNccl,
    /// Compare with other implementations: transformers, megatron-core, torch, tokenizers, peft and others.
    ///
    /// Runs every script that makes fixtures of this repository on a copy of the fixtures, and compares its output
    /// with the committed fixtures. Then converts the Hugging Face fixtures to a checkpoint and back, and compares
    /// the logits of transformers. Makes a virtual environment with pinned packages in peers in the target folder
    /// (several gigabytes), or uses the Python of the variable PEERS_PYTHON. Not part of `ci`, which replays the
    /// fixtures.
    Peers(peers::Options),
    /// Run the CUDA build without a GPU, on an emulated GPU.
    ///
    /// NVIDIA's NVRTC compiles the kernels as on a GPU. The emulator in tools/emulator/ runs their PTX. Programs load
    /// the emulator as libcuda.so.1. Arguments after `--` are passed to the tests: a part of their names, or an
    /// option. Needs Linux and the compilers of `check-cuda`. Unlike other CUDA builds, it does not download LLVM.
    Emulate(emulate::Options),
    /// Run all measurements on the NVIDIA GPU of this machine.
    ///
    /// Runs the kit of `gpu-kit`, and then the suites of `emulate` on the GPU. The suite `traffic` is left out,
    /// because only the emulator counts memory traffic. Needs the driver and Python 3. Not part of `ci`.
    ///
    /// Writes report.md and gpu-kit-results.tar.gz, which the kit updates after each step. Also writes suites.txt
    /// with the failed tests and the first lines of their output.
    Gpu(gpu::Options),
    /// Pack a kit that measures burn-megatron on another machine with an NVIDIA GPU.
    ///
    /// The archive contains the stripped program for CUDA, a script and the comparison with PyTorch. The other
    /// machine needs the driver and Python 3, but no git, cargo or network: see docs/src/gpu.md. Needs Linux, strip,
    /// tar and xz. Not part of `ci`.
    GpuKit(gpu_kit::Options),
    /// Check the book: every page of its summary exists and every relative link resolves.
    ///
    /// README.md is checked as well. Builds the book if mdbook is installed.
    Book,
    /// Run the shell commands of README.md and of the book exactly as printed.
    ///
    /// Takes the commands from the code blocks with the language `sh`. The commands of a page run one after the other in a
    /// copy of the checkout, with a deadline. xtask/docs-commands.tsv lists the commands that cannot run here, the
    /// commands that CI leaves out, and the files that a page assumes. Every command must run or be listed, and an entry
    /// without a command is an error. Programs are built in the release profile. Takes an hour on two cores.
    #[cfg(unix)]
    DocsCommands(docs_commands::Options),
    /// Train the default recipe for a few steps, check that its loss falls, and run the examples. With MPI, the
    /// recipe also trains on four processes, whose metrics must equal the metrics of four threads.
    Recipe,
    /// Plan every published recipe on 8, 64, 256 and 1,024 H100, and on 256 of each other device.
    ///
    /// Each case ends with a layout, or with the smallest memory if no layout fits. A case with an error or a panic fails.
    /// Prints a line for each case when it ends, and a table of all cases at the end. Not part of `ci`,
    /// whose tests plan six of the cases.
    PlanAll(plan_all::Options),
    /// Record the results of small runs, plans and kernel sources, or compare with the record.
    ///
    /// A refactoring must not change any of them. On a processor that has a record, runs are compared bit by bit. On
    /// other processors they are compared up to the bound of each run. The programs are built with the tests.
    /// `test --all` runs the check.
    Golden(golden::Options),
    /// Count the lines of code of every tracked Rust file, by purpose.
    ///
    /// Only lines with code are counted, without comments, documentation and blank lines. Product lines are the
    /// shipped crates without their tests. Not part of `ci`.
    Lines,
    /// Run the first steps of a new user, and print how long each step takes.
    ///
    /// The steps are clone, install, the default recipe, a run on the user's text that is interrupted and resumed,
    /// generate, and convert. The run uses a new folder and an environment of only PATH, HOME and the settings of
    /// cargo and rustup, so that the build starts from nothing. Uncommitted changes are not cloned. Not part of `ci`.
    #[cfg(unix)]
    FirstHour(first_hour::Options),
    /// Disturb runs for some minutes with `kill -9`, signals and injected faults, and resume them.
    ///
    /// Each round draws a layout, a precision and checkpoint settings. It trains once undisturbed and once disturbed,
    /// with ranks as threads and, with MPI, as processes. After each disturbance the metrics must equal the metrics
    /// of the undisturbed run bit for bit. No checkpoint may be lost, no process may be left, and no file outside of
    /// the run folder may change. Works in a temporary folder, which is kept after a finding. Not part of `ci`. Needs
    /// Linux.
    #[cfg(unix)]
    Soak(soak::Options),
    /// Compare random recipes in random layouts with one rank, for some minutes.
    ///
    /// Each case draws a small model, a layout of 2 to 8 ranks and a few unusual settings. It trains for 2 or 3 steps
    /// in the layout and on one rank, in f64. Metrics, generated text and the last checkpoint must agree up to
    /// rounding. Each third case also runs `verify`. Refusals with an error message are counted by reason. A
    /// difference, a panic, a failure after the start of the run and a hang are faults. The first case of a fault is
    /// shrunk to a minimal recipe, which is printed with the commands that repeat it. `test --all` runs 100 cases
    /// with a fixed seed.
    FuzzLayouts(fuzz_layouts::Options),
    /// Run everything above except check-nccl, peers, emulate, gpu, gpu-kit, plan-all, lines, first-hour, soak and
    /// fuzz-layouts: format, words, lint, docs, book, package, test, cuda, check-cuda, recipe, docs-commands.
    ///
    /// The kernels are compiled for sm_90a only. The recipe and the commands of the documentation run in the dev
    /// profile, with the build of the tests. Slow commands are left out. Steps that need a missing driver, MPI or
    /// compilers are skipped and listed.
    Ci,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let root = match repository_root() {
        Ok(root) => root,
        Err(message) => {
            eprintln!("error: {message}");
            return ExitCode::FAILURE;
        }
    };
    let mut report = Report::default();
    match cli.command {
        Command::Test { all } => {
            let extent = if all { Extent::All } else { Extent::Quick };
            test::run(extent, &root, &mut report);
        }
        Command::Check { check, list: false } => check::run(check, &root, &mut report),
        Command::Check { check, list: true } => check::list(check, &root, &mut report),
        Command::CheckCuda(options) => {
            check_cuda::run(&options, Compilers::Needed, &root, &mut report);
        }
        Command::CheckNccl => check_nccl::run(&root, &mut report),
        Command::Peers(options) => peers::run(&options, &root, &mut report),
        Command::Emulate(options) => {
            emulate::run(&options, Compilers::Needed, &root, &mut report);
        }
        Command::Gpu(options) => gpu::run(&options, &root, &mut report),
        Command::GpuKit(options) => gpu_kit::run(&options, &root, &mut report),
        Command::Book => book::run(&root, &mut report),
        #[cfg(unix)]
        Command::DocsCommands(options) => docs_commands::run(&options, &root, &mut report),
        Command::Recipe => recipe::run(recipe::Profile::Release, &root, &mut report),
        Command::Golden(options) => golden::run(&options, &root, &mut report),
        Command::Lines => lines::run(&root, &mut report),
        Command::PlanAll(options) => plan_all::run(&options, &root, &mut report),
        #[cfg(unix)]
        Command::FirstHour(options) => first_hour::run(&options, &root, &mut report),
        #[cfg(unix)]
        Command::Soak(options) => soak::run(&options, &root, &mut report),
        Command::FuzzLayouts(options) => fuzz_layouts::run(&options, &root, &mut report),
        Command::Ci => ci(&root, &mut report),
    }
    report.finish()
}

/// Runs the cheap checks first, and the checks with separate builds last.
fn ci(root: &Path, report: &mut Report) {
    check::run(Check::Format, root, report);
    check::run(Check::Words, root, report);
    check::run(Check::Order, root, report);
    check::run(Check::Settings, root, report);
    check::run(Check::Circles, root, report);
    report.step("mpi", || {
        mpi::find_or_install().map_or_else(Outcome::Skipped, |()| Outcome::Passed)
    });
    check::run(Check::Lint, root, report);
    check::run(Check::Docs, root, report);
    book::run(root, report);
    check::run(Check::Package, root, report);
    test::run(Extent::All, root, report);
    peers::skip(report);
    check::run(Check::Cuda, root, report);
    check_cuda::run(&Options::of_ci(), Compilers::Optional, root, report);
    recipe::run(recipe::Profile::Dev, root, report);
    #[cfg(unix)]
    docs_commands::run(&docs_commands::Options::of_ci(), root, report);
}

/// Returns the nearest parent folder that contains this crate.
fn repository_root() -> Result<PathBuf, String> {
    let here = env::current_dir().map_err(|e| format!("the current folder: {e}"))?;
    here.ancestors()
        .find(|folder| folder.join("xtask/Cargo.toml").is_file())
        .map(Path::to_path_buf)
        .ok_or_else(|| {
            format!(
                "neither {} nor a parent folder has xtask/Cargo.toml",
                here.display()
            )
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn check_runs_everything_unless_told() {
        let cli = Cli::try_parse_from(["xtask", "check"]).unwrap();
        assert!(matches!(
            cli.command,
            Command::Check {
                check: Check::All,
                list: false
            }
        ));
        let cli = Cli::try_parse_from(["xtask", "check", "lint"]).unwrap();
        assert!(matches!(
            cli.command,
            Command::Check {
                check: Check::Lint,
                ..
            }
        ));
    }
}
