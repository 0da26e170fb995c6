//! Builds the emulator, and the CUDA tests without LLVM.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::CudaTools;
use super::linker::without_llvm;
use crate::binaries::{self, TestBinary};
use crate::process::{cargo, run as run_command};

/// The names of the libraries that programs open. The emulator replaces all of them.
const NAMES: [&str; 6] = [
    "libcuda.so",
    "libcuda.so.1",
    "libcublasLt.so",
    "libcublasLt.so.12",
    "libnccl.so",
    "libnccl.so.2",
];

/// Folders of the wheels whose headers kernels include. The headers of the first folder include headers of the
/// second.
const HEADERS: [&str; 2] = ["cuda_runtime/include", "cuda_nvcc/include"];

/// The packages of one build. cargo rebuilds everything if the selected packages and features change.
const PACKAGES: &[&str] = &[
    "-p",
    "burn-megatron-kernels",
    "-p",
    "burn-megatron-comm",
    "-p",
    "burn-megatron",
    "-p",
    "burn-megatron-cli",
    "-p",
    "burn-megatron-tests",
    "-p",
    "burn-megatron-learner",
    "--features",
    "burn-megatron-kernels/cuda,burn-megatron-comm/cuda,burn-megatron/cuda,burn-megatron-cli/cuda,burn-megatron-learner/cuda",
    "--features",
    "burn-megatron-tests/cuda,burn-megatron-tests/tracing",
];

/// Builds the emulator, and makes a folder that resembles a CUDA installation, with the libraries and the headers of
/// the wheels.
pub fn emulator(root: &Path, tools: &CudaTools) -> Result<(), String> {
    let package = ["build", "--release", "-p", "burn-megatron-emulator"];
    run_command(&mut cargo(root, &package))?;
    let failed = |error| format!("{}: {error}", tools.cuda.display());
    let library = tools.target.join("release/libburn_megatron_emulator.so");
    let libraries = NAMES.map(|name| (library.clone(), name.into()));
    link(&tools.cuda, &libraries).map_err(failed)?;
    headers_folder(tools)
}

/// Makes the folder with the headers of the wheels.
pub fn headers_folder(tools: &CudaTools) -> Result<(), String> {
    let headers = headers(&tools.wheels.join("nvidia"))?;
    let failed = |error| format!("{}: {error}", tools.cuda.display());
    link(&tools.cuda.join("include"), &headers).map_err(failed)
}

/// Returns the folder that resembles a CUDA installation.
pub fn folder(target: &Path) -> PathBuf {
    target.join("emulator")
}

/// Builds the command and the benchmarks in the same folder, with optimization and without LLVM.
pub fn command(root: &Path, target: &Path) -> Result<PathBuf, String> {
    let build = [
        "build",
        "--release",
        "-p",
        "burn-megatron-cli",
        "-p",
        "burn-megatron-bench",
    ];
    let features = [
        "--features",
        "burn-megatron-cli/cuda,burn-megatron-bench/cuda",
    ];
    let mut build = cargo(root, &[&build[..], &features].concat());
    without_llvm(&mut build, &folder(target))?;
    run_command(&mut build)?;
    Ok(target.join("release/burn-megatron"))
}

/// Builds all tests without LLVM, and the command that some tests run.
pub fn tests(root: &Path, tools: &CudaTools) -> Result<Vec<TestBinary>, String> {
    let tests = ["test", "--no-run", "--lib", "--test", "gpu*"];
    let mut build = cargo(root, &[&tests, PACKAGES].concat());
    without_llvm(&mut build, &tools.cuda)?;
    binaries::build(build)
}

/// Returns each header, or folder of headers, with its name.
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

/// Creates symbolic links in a folder. Each pair holds the target and the name of a link.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

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
}
