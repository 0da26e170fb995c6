//! The command `kernel-check`. `cargo xtask check-cuda` finds the compilers and runs this command.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn_megatron_kernel_check::arch::{self, ARCHS, Arch};
use burn_megatron_kernel_check::bound::{self, H200, LaunchShape};
use burn_megatron_kernel_check::checks::{self, KernelRequirements};
use burn_megatron_kernel_check::table::{KernelOutcome, ReportRow, render};
use burn_megatron_kernel_check::toolchain::Toolchain;
use burn_megatron_kernel_check::{aims, emit, types};
use burn_megatron_kernels::aot::{AotInstance, aot_instances};
use clap::Parser;
use rayon::prelude::*;

/// Compiles every CUDA kernel to machine code, without a GPU, and checks it.
#[derive(Parser)]
#[command(name = "kernel-check")]
struct Cli {
    /// Folder with NVIDIA's compilers, as filled by `pip install --target`.
    #[arg(long, value_name = "DIR", required_unless_present = "sources_only")]
    wheels: Option<PathBuf>,
    /// Write the CUDA C++ of every kernel, and compile nothing. Needs none of NVIDIA's compilers.
    #[arg(long, conflicts_with = "wheels")]
    sources_only: bool,
    /// Compile for this architecture only: sm_80, sm_90a or sm_100a. May be repeated. By default, sm_90a compiles
    /// every type. The other architectures skip the f32 and f16 versions of kernels that also exist in bf16.
    #[arg(long, value_name = "ARCH", value_parser = arch::parse)]
    arch: Vec<Arch>,
    /// Compile only kernels whose name contains this text.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Folder for the files of every kernel: CUDA C++, PTX, cubin and SASS. Each architecture has a subfolder.
    #[arg(long, value_name = "DIR")]
    keep: PathBuf,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Compiles and checks the kernels. Returns whether every kernel passed.
fn run(cli: &Cli) -> Result<bool, String> {
    let start = Instant::now();
    let work = kernels(cli)?;
    let Some(wheels) = &cli.wheels else {
        return write_sources(&work).map(|()| true);
    };
    let toolchain = Toolchain::open(wheels)?;
    let mut rows: Vec<_> = work
        .par_iter()
        .map(|(arch, folder, kernel)| row(&toolchain, *arch, folder, kernel))
        .collect();
    // The rows of a kernel become adjacent, one row per architecture.
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    print!("{}", render(&rows));
    let excuses: Vec<_> = rows.iter().filter_map(ReportRow::excuse).collect();
    excuses.iter().for_each(|excuse| println!("\n{excuse}"));
    let failures: Vec<_> = rows.iter().filter_map(ReportRow::failure).collect();
    for failure in &failures {
        println!("\n{failure}");
    }
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "\n{} kernels in {seconds:.1} s: {} passed, {} failed",
        rows.len(),
        rows.len() - failures.len(),
        failures.len()
    );
    Ok(failures.is_empty())
}

/// A kernel, its architecture, and the folder of its files.
type Work = (Arch, PathBuf, AotInstance);

/// Returns the kernels that the flags select, and creates their folders.
fn kernels(cli: &Cli) -> Result<Vec<Work>, String> {
    let archs = if cli.arch.is_empty() {
        &ARCHS[..]
    } else {
        &cli.arch
    };
    let mut work = Vec::new();
    for arch in archs {
        let folder = cli.keep.join(arch.name);
        fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let kernels = aot_instances(emit::target(*arch));
        let names = names(&kernels)?;
        let every_type = !cli.arch.is_empty() || arch.name == types::EVERY_TYPE;
        let part = cli.only.as_deref().unwrap_or_default();
        let wanted = |kernel: &AotInstance| {
            kernel.name.contains(part) && (every_type || !types::is_in_bf16(&kernel.name, &names))
        };
        let kernels = kernels.into_iter().filter(wanted);
        work.extend(kernels.map(|kernel| (*arch, folder.clone(), kernel)));
    }
    if work.is_empty() {
        return Err(match &cli.only {
            Some(part) => format!("no kernel name contains {part:?}"),
            None => "no kernels to compile".into(),
        });
    }
    Ok(work)
}

/// Returns the path of the files of a kernel, without an extension.
fn stem(folder: &Path, kernel: &AotInstance) -> PathBuf {
    folder.join(kernel.name.replace('/', "-"))
}

fn write_sources(work: &[Work]) -> Result<(), String> {
    work.par_iter().try_for_each(|(arch, folder, kernel)| {
        let source = emit::emit(kernel, *arch)?;
        let file = stem(folder, kernel).with_added_extension("cu");
        fs::write(&file, source.text).map_err(|e| format!("{}: {e}", file.display()))
    })
}

/// Returns the names of all kernels. Duplicate names are an error, since the files would overwrite each other.
fn names(kernels: &[AotInstance]) -> Result<HashSet<String>, String> {
    let mut names = HashSet::new();
    match kernels
        .iter()
        .find(|kernel| !names.insert(kernel.name.clone()))
    {
        Some(kernel) => Err(format!("duplicate kernel name {}", kernel.name)),
        None => Ok(names),
    }
}

fn row(toolchain: &Toolchain, arch: Arch, folder: &Path, kernel: &AotInstance) -> ReportRow {
    let outcome = emit::emit(kernel, arch).and_then(|source| {
        let stem = stem(folder, kernel);
        let compiled = toolchain
            .build(&source.text, arch, &stem)
            .map_err(|error| error.to_string())?;
        let shared = source.shared + compiled.usage.shared;
        let requirements = KernelRequirements {
            streams: kernel.streams,
            multiplies: kernel.multiplies,
        };
        let mut defects = checks::check_kernel(&compiled, shared, requirements, arch);
        let launch = LaunchShape {
            units: source.units,
            registers: compiled.usage.registers,
            shared,
        };
        let aim = aims::of(&kernel.name).filter(|_| kernel.streams && arch.name == H200.arch);
        let bound = aim.and_then(|aim| {
            let bound = bound::bound(&compiled.code, launch, aim.cached, &H200)?;
            Some((bound, aim))
        });
        if let Some((bound, aim)) = &bound {
            let file = stem.with_added_extension("bound");
            let text = bound::explain(&compiled.code, bound, aim.cached, &H200);
            fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))?;
        }
        defects.extend(
            bound
                .as_ref()
                .and_then(|(bound, aim)| checks::check_bound(bound, aim)),
        );
        Ok(KernelOutcome::Compiled {
            defects,
            bound,
            compiled,
            shared,
        })
    });
    ReportRow {
        name: kernel.name.clone(),
        arch,
        outcome: outcome.unwrap_or_else(KernelOutcome::CompileFailed),
    }
}
