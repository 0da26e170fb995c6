//! `cargo xtask gpu`: all measurements on the NVIDIA GPU of this machine.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;

use crate::emulate;
use crate::process::{run as run_command, run_reading};
use crate::report::{Outcome, Report};

/// Where the results go.
#[derive(Args)]
pub struct Options {
    /// Folder for the tables and the JSON files of the benchmarks; it is created.
    #[arg(long, value_name = "DIR", default_value = "gpu-results")]
    out: PathBuf,
    /// Benchmarks only, without the suites of `emulate`.
    #[arg(long)]
    no_suites: bool,
}

/// A benchmark: its name, the flags of `bench`, the forms of attention, and the script that times PyTorch on the same
/// sizes.
struct Benchmark {
    name: &'static str,
    flags: &'static [&'static str],
    attention: Option<&'static str>,
    torch: &'static str,
}

/// Where an engine of attention cannot be used, the benchmark ends.
const BENCHMARKS: [Benchmark; 3] = [
    step("step-124m", &SMALL, "mma,portable"),
    step("step-1.5b", &XL, "mma,portable"),
    Benchmark {
        name: "kernels",
        flags: &["kernels", "--dtype", "bf16"],
        attention: None,
        torch: "torch_kernels.py",
    },
];

const SMALL: [&str; 5] = ["step", "--model", "124m", "--micro-batch-size", "16,64"];
const XL: [&str; 5] = ["step", "--model", "1.5b", "--micro-batch-size", "8,16"];

const fn step(
    name: &'static str,
    flags: &'static [&'static str],
    attention: &'static str,
) -> Benchmark {
    Benchmark {
        name,
        flags,
        attention: Some(attention),
        torch: "torch_step.py",
    }
}

/// Runs the suites of `emulate` and the benchmarks on the GPU, each beside PyTorch where that is installed.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    let mut found = false;
    report.step("gpu", || {
        let described = describe(root, &options.out);
        found = described.is_ok();
        described
    });
    if !found {
        return;
    }
    if !options.no_suites {
        emulate::run_on_gpu(root, report);
    }
    let mut command = None;
    report.step("command for cuda", || {
        command = Some(emulate::command_for_cuda(root)?);
        Ok::<_, String>(())
    });
    let Some(program) = command else { return };
    for benchmark in &BENCHMARKS {
        let json = options.out.join(format!("{}.json", benchmark.name));
        report.step(benchmark.name, || {
            let mut bench = program();
            bench
                .arg("bench")
                .args(benchmark.flags)
                .args(["--device", "cuda"]);
            if let Some(attention) = benchmark.attention {
                bench.args(["--attention", attention]);
            }
            write_table(bench.arg("--json").arg(&json), &json.with_extension("txt"))
        });
        report.step(benchmark.torch, || torch(benchmark.torch, &json, root));
    }
}

/// Writes the GPU, its driver and the commit to `gpu.txt`.
fn describe(root: &Path, out: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", out.display());
    fs::create_dir_all(out).map_err(failed)?;
    let mut text = String::new();
    let mut commit = Command::new("git");
    commit
        .current_dir(root)
        .args(["describe", "--always", "--dirty"]);
    run_reading(&mut commit, |line| text += line)?;
    let mut smi = Command::new("nvidia-smi");
    smi.args([
        "--query-gpu=name,driver_version,memory.total,clocks.max.sm",
        "--format=csv",
    ]);
    run_reading(&mut smi, |line| text += line)?;
    fs::write(out.join("gpu.txt"), text).map_err(failed)
}

/// Runs a command, and copies its output to a file.
fn write_table(command: &mut Command, path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut file = File::create(path).map_err(failed)?;
    let mut written = Ok(());
    run_reading(command, |line| {
        if written.is_ok() {
            written = file.write_all(line.as_bytes());
        }
    })?;
    written.map_err(failed)
}

fn torch(script: &str, json: &Path, root: &Path) -> Outcome {
    if !json.is_file() {
        return Outcome::Skipped("the benchmark before it failed".into());
    }
    let installed = Command::new("python3")
        .args(["-c", "import torch"])
        .output();
    if !installed.is_ok_and(|output| output.status.success()) {
        return Outcome::Skipped("python3 has no torch".into());
    }
    let mut python = Command::new("python3");
    python.arg(root.join("cli/bench").join(script)).arg(json);
    run_command(python.arg("--markdown").arg(json.with_extension("md"))).into()
}
