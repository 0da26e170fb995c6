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

/// The file to send.
const REPORT: &str = "report.md";

/// Runs the suites of `emulate` and the benchmarks on the GPU, each beside PyTorch where that is installed, and writes
/// the results into one file.
pub fn run(options: &Options, root: &Path, report: &mut Report) {
    measure(options, root, report);
    let steps = report.text();
    report.step("report", || {
        let path = options.out.join(REPORT);
        let failed = |error| format!("{}: {error}", path.display());
        fs::write(&path, collect(&options.out, &steps).map_err(failed)?).map_err(failed)?;
        println!("please send {}", path.display());
        Ok::<_, String>(())
    });
}

/// The steps, then each text and table of the folder.
fn collect(out: &Path, steps: &str) -> std::io::Result<String> {
    let mut text = format!("# burn-megatron on a GPU\n\n```text\n{steps}```\n");
    let tables = BENCHMARKS
        .iter()
        .flat_map(|benchmark| ["txt", "md", "json"].map(|end| format!("{}.{end}", benchmark.name)));
    for file in ["gpu.txt", "env.txt"]
        .map(String::from)
        .into_iter()
        .chain(tables)
    {
        match fs::read_to_string(out.join(&file)) {
            Ok(content) => {
                text += &format!("\n## {file}\n\n```text\n{}\n```\n", content.trim_end())
            }
            // A step that failed or was skipped wrote none.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(text)
}

fn measure(options: &Options, root: &Path, report: &mut Report) {
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
    report.step("environment", || {
        write_table(program().arg("env"), &options.out.join("env.txt"))
    });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn the_report_has_the_steps_and_what_was_written() {
        let out = TempDir::new("gpu-report").unwrap();
        out.write("env.txt", "device cuda  1 device\n");
        out.write("step-124m.txt", "tokens/s\n");
        let report = collect(out.path(), "gpu  passed\n").unwrap();
        let expected = "# burn-megatron on a GPU\n\n```text\ngpu  passed\n```\n\n## env.txt\n\n```text\ndevice cuda  1 device\n\
                        ```\n\n## step-124m.txt\n\n```text\ntokens/s\n```\n";
        assert_eq!(report, expected);
    }
}
