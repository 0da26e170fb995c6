//! `cargo xtask emulate`: the tests of the CUDA build, with no GPU, on the emulated one.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use serde_json::Value;

use crate::check_cuda::Compilers;
use crate::process::{cargo, read_quietly, run as run_command, target_folder};
use crate::report::{Outcome, Report};
use crate::test::run_tests;
use crate::totals::Totals;
use crate::{llvm, wheels};

/// The package whose tests are run: NVRTC compiles its kernels, and the emulator runs them.
const PACKAGE: &[&str] = &[
    "-p",
    "burn-megatron-kernels",
    "--features",
    "cuda",
    "--lib",
    "--message-format",
    "json-render-diagnostics",
];

/// The names under which programs open what the emulator is in one file.
const NAMES: [&str; 6] = [
    "libcuda.so",
    "libcuda.so.1",
    "libcublasLt.so",
    "libcublasLt.so.12",
    "libnccl.so",
    "libnccl.so.2",
];

/// Folders of the wheels whose headers kernels include: those of the second are part of the first's.
const HEADERS: [&str; 2] = ["cuda_runtime/include", "cuda_nvcc/include"];

/// What is run.
#[derive(Args, Default)]
pub struct Options {
    /// What the tests are given: a part of their names, `--test-threads`.
    #[arg(last = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

/// What the tests need, beside what cargo builds.
struct Tools {
    target: PathBuf,
    wheels: PathBuf,
}

/// Finds or installs the compilers, builds the emulator, then runs the tests on it.
pub fn run(options: &Options, compilers: Compilers, root: &Path, report: &mut Report) {
    let mut found = Err("the CUDA compilers were not looked for".to_owned());
    report.step("cuda compilers", || {
        found = find(root);
        compilers.judge(&found)
    });
    let Ok(tools) = found else {
        report.step("emulated tests", || {
            Outcome::LeftOut("for want of compilers".into())
        });
        return;
    };
    let mut cuda = Err(String::new());
    report.step("emulator", || {
        cuda = build(root, &tools);
        cuda.as_ref().map(drop).map_err(Clone::clone)
    });
    let mut executable = Err(String::new());
    report.step("cuda tests, built", || {
        executable = match &cuda {
            Ok(folder) => build_tests(root, folder),
            Err(_) => Err("for want of the emulator".into()),
        };
        executable.as_ref().map(drop).map_err(Clone::clone)
    });
    report.step("emulated tests", || {
        let (Ok(cuda), Ok(executable)) = (cuda, executable) else {
            return Outcome::LeftOut("for want of what was to be built".into());
        };
        let mut command = tests(&executable, root, &tools, &cuda);
        command.args(&options.arguments);
        let mut totals = Totals::default();
        let outcome = run_tests(&mut command, &mut totals);
        println!("{totals}");
        outcome.into()
    });
}

fn find(root: &Path) -> Result<Tools, String> {
    if env::consts::OS != "linux" {
        let os = env::consts::OS;
        return Err(format!("the emulator is for Linux, and this is {os}"));
    }
    let target = target_folder(root)?;
    let wheels = wheels::folder(&target);
    wheels::find_or_install(&wheels)?;
    // Links are made to it, and tests run in another folder.
    let wheels =
        fs::canonicalize(&wheels).map_err(|error| format!("{}: {error}", wheels.display()))?;
    Ok(Tools { target, wheels })
}

/// Builds the emulator, and makes a folder that looks like CUDA: the libraries that it is, and the
/// headers of the wheels.
fn build(root: &Path, tools: &Tools) -> Result<PathBuf, String> {
    let package = ["build", "--release", "-p", "burn-megatron-emulator"];
    run_command(&mut cargo(root, &package))?;
    let folder = tools.target.join("emulator");
    let failed = |error| format!("{}: {error}", folder.display());
    let library = tools.target.join("release/libburn_megatron_emulator.so");
    let libraries = NAMES.map(|name| (library.clone(), name.into()));
    link(&folder, &libraries).map_err(failed)?;
    let headers = headers(&tools.wheels.join("nvidia"))?;
    link(&folder.join("include"), &headers).map_err(failed)?;
    Ok(folder)
}

/// Each header, or folder of headers, with its name.
fn headers(nvidia: &Path) -> Result<Vec<(PathBuf, OsString)>, String> {
    let mut headers = Vec::new();
    for folder in HEADERS.map(|folder| nvidia.join(folder)) {
        let unreadable = |error| format!("{}: {error}", folder.display());
        for entry in fs::read_dir(&folder).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            headers.push((entry.path(), entry.file_name()));
        }
    }
    Ok(headers)
}

/// Makes links in a folder: each to what it stands for, under a name.
#[cfg(unix)]
fn link(folder: &Path, links: &[(PathBuf, OsString)]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    for (target, name) in links {
        let link = folder.join(name);
        if fs::symlink_metadata(&link).is_ok() {
            fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(target, link)?;
    }
    Ok(())
}

#[cfg(not(unix))]
fn link(_folder: &Path, _links: &[(PathBuf, OsString)]) -> std::io::Result<()> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// Builds the tests, without LLVM; the file that runs them.
fn build_tests(root: &Path, folder: &Path) -> Result<PathBuf, String> {
    let (name, value) = llvm::DOCUMENTATION;
    let mut callers = Vec::new();
    let mut build = cargo(root, &[&["build"], PACKAGE].concat());
    read_quietly(build.env(name, value), |line| {
        callers.extend(llvm::caller(line));
    })?;
    let stand_in = folder.join("no-llvm.txt");
    llvm::stand_in(&callers, &stand_in)?;
    // Arguments for the linker that go to the last crate alone: nothing else is built anew.
    let mut build = cargo(root, &[&["rustc", "--profile", "test"], PACKAGE].concat());
    build
        .arg("--")
        .arg(format!("-Clink-arg=@{}", stand_in.display()));
    let mut executable = None;
    read_quietly(build.env(name, value), |line| {
        executable = executable_in(line).or(executable.take());
    })?;
    executable.ok_or_else(|| "cargo names no file that runs the tests".into())
}

/// The file that one of cargo's messages says it has built.
fn executable_in(message: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(message).ok()?;
    message["executable"].as_str().map(PathBuf::from)
}

fn tests(executable: &Path, root: &Path, tools: &Tools, cuda: &Path) -> Command {
    let folders = [cuda.into(), tools.wheels.join("nvidia/cuda_nvrtc/lib")];
    let mut command = Command::new(executable);
    command
        // Where cargo runs them.
        .current_dir(root.join("burn-megatron-kernels"))
        .env("LD_LIBRARY_PATH", search_path(&folders))
        .env("CUDA_PATH", cuda)
        // Time on an emulated device says nothing of which form of a kernel is the fastest.
        .env("CUBECL_AUTOTUNE_LEVEL", "minimal");
    command
}

/// Folders that come before those that are searched anyway.
fn search_path(folders: &[PathBuf]) -> OsString {
    let before = env::var_os("LD_LIBRARY_PATH");
    let before = before.iter().flat_map(env::split_paths);
    let all = folders.iter().cloned().chain(before);
    env::join_paths(all).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn the_file_is_read_from_cargos_messages() {
        let built = r#"{"reason":"compiler-artifact","executable":"/target/debug/deps/k-1"}"#;
        assert_eq!(executable_in(built), Some("/target/debug/deps/k-1".into()));
        let library = r#"{"reason":"compiler-artifact","executable":null}"#;
        assert_eq!(executable_in(library), None);
        assert_eq!(executable_in("no JSON"), None);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_made_anew() {
        let folder = TempDir::new("links").unwrap();
        for library in ["/old.so", "/new.so"] {
            link(folder.path(), &[(library.into(), "libcuda.so.1".into())]).unwrap();
        }
        let target = fs::read_link(folder.path().join("libcuda.so.1")).unwrap();
        assert_eq!(target, Path::new("/new.so"));
    }

    #[test]
    fn headers_of_both_wheels_stand_in_one_folder() {
        let folder = TempDir::new("headers").unwrap();
        folder.write("cuda_runtime/include/mma.h", "");
        assert!(headers(folder.path()).is_err());
        folder.write("cuda_nvcc/include/crt/mma.h", "");
        let headers = headers(folder.path()).unwrap();
        let names: Vec<_> = headers.into_iter().map(|(_, name)| name).collect();
        assert_eq!(names, ["mma.h", "crt"]);
    }

    #[test]
    fn the_tests_find_the_emulator_before_a_driver() {
        let tools = Tools {
            wheels: "/wheels".into(),
            target: "/target".into(),
        };
        let [executable, root, libraries] = ["/k-1", "/root", "/target/emulator"].map(Path::new);
        let command = super::tests(executable, root, &tools, libraries);
        let path = command
            .get_envs()
            .find(|(name, _)| *name == "LD_LIBRARY_PATH")
            .and_then(|(_, value)| value)
            .unwrap();
        let first: Vec<_> = env::split_paths(path).take(2).collect();
        let nvrtc = "/wheels/nvidia/cuda_nvrtc/lib";
        assert_eq!(first, [libraries, Path::new(nvrtc)]);
    }
}
