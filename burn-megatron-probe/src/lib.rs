//! Finds NCCL, MPI, NVIDIA's driver and NVRTC on this machine.
//!
//! Needs no feature. Libraries are opened at run time, queried and closed again.

use std::env;
use std::error::Error;
use std::ffi::{OsStr, c_int};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use libloading::{Library, Symbol};
use serde::Serialize;

mod cuda;

pub use cuda::{CudaDriverInfo, CudaProblem, CudaToolkit, SharedLibrary, cuda_driver};

/// The file names of NCCL's library.
pub const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The time that a program may take to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// NCCL, as the dynamic linker finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NcclLibrary {
    /// Major, minor and patch, such as `(2, 23, 3)`.
    pub version: (u32, u32, u32),
    /// The file, or the name that was opened where the system does not report the file.
    pub path: PathBuf,
}

/// OpenMPI's or another MPI's `mpirun`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MpirunProgram {
    /// The program.
    pub path: PathBuf,
    /// The first line of its `--version`.
    pub version: String,
}

/// Opens NCCL under [`NCCL_NAMES`].
///
/// # Errors
/// The error of the dynamic linker or the library, for each name.
pub fn nccl() -> Result<NcclLibrary, String> {
    first_nccl(&NCCL_NAMES)
}

/// Finds `mpirun` on `PATH` and gets its version.
///
/// # Errors
/// If it is not found, does not start, or does not answer within 10 s.
pub fn mpirun() -> Result<MpirunProgram, String> {
    let path = program_on_path("mpirun").ok_or("mpirun not found in PATH")?;
    let version = program_version(&path)?;
    Ok(MpirunProgram { path, version })
}

/// Returns the first executable file of this name in the folders of `PATH`.
pub fn program_on_path(name: impl AsRef<Path>) -> Option<PathBuf> {
    find(&env::var_os("PATH")?, name)
}

/// Returns the first line that a program prints for `--version`.
///
/// # Errors
/// If the program does not start, prints nothing, or does not answer within 10 s.
pub fn program_version(program: &Path) -> Result<String, String> {
    version_of(program, VERSION_TIMEOUT)
}

fn first_nccl(names: &[&str]) -> Result<NcclLibrary, String> {
    // SAFETY: nccl.h declares `ncclResult_t ncclGetVersion(int*)`, whose result is an int.
    let found = first_library(names, |library| unsafe {
        let version: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
            library.get(b"ncclGetVersion")?;
        let mut code = 0;
        match version(&mut code) {
            0 => Ok((nccl_version(number(code)), *version as usize)),
            result => Err(format!("ncclGetVersion reports error {result}").into()),
        }
    });
    let (version, path) = found.map_err(|reasons| reasons.join("; "))?;
    Ok(NcclLibrary { version, path })
}

/// Returns the version of the first library that can be opened and queried, and its file; else the reason for each name.
/// `query` returns the version and the address of a function.
fn first_library<V>(
    names: &[&str],
    query: impl Fn(&Library) -> Result<(V, usize), Box<dyn Error>>,
) -> Result<(V, PathBuf), Vec<String>> {
    let mut reasons = vec![];
    for name in names {
        // SAFETY: opens a library of NVIDIA, which does nothing harmful when it is opened.
        let opened = unsafe { Library::new(name) };
        let found = opened.map_err(Box::from).and_then(|library| {
            let (version, function) = query(&library)?;
            // While the library is open.
            let path = mapped_file(function).unwrap_or_else(|| name.into());
            Ok((version, path))
        });
        match found.map_err(|error: Box<dyn Error>| error.to_string()) {
            Ok(found) => return Ok(found),
            Err(reason) if reason.contains(name) => reasons.push(reason),
            Err(reason) => reasons.push(format!("{name}: {reason}")),
        }
    }
    Err(reasons)
}

/// Decodes NCCL's numbers: 22303 is 2.23.3; up to 2.8 they were shorter, and 2804 is 2.8.4.
fn nccl_version(code: u32) -> (u32, u32, u32) {
    let major = if code < 10_000 { 1_000 } else { 10_000 };
    (code / major, code % major / 100, code % 100)
}

fn number(value: c_int) -> u32 {
    value.try_into().unwrap_or(0)
}

/// The file that is mapped at an address of this process, on Linux.
fn mapped_file(address: usize) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (begin, end) = range.split_once('-')?;
        let bound = |hex| usize::from_str_radix(hex, 16).ok();
        let inside = (bound(begin)?..bound(end)?).contains(&address);
        let path = rest.find('/').map(|at| PathBuf::from(&rest[at..]))?;
        inside.then_some(path)
    })
}

/// The first executable of this name in the folders of a `PATH`.
fn find(folders: &OsStr, name: impl AsRef<Path>) -> Option<PathBuf> {
    let mut programs = env::split_paths(folders).map(|folder| folder.join(&name));
    programs.find(|program| is_program(program))
}

/// Whether a path is an executable file.
#[cfg(unix)]
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;

    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Whether a path is a file.
#[cfg(not(unix))]
pub fn is_program(path: &Path) -> bool {
    path.is_file()
}

/// The first line that a program prints for `--version`.
fn version_of(program: &Path, timeout: Duration) -> Result<String, String> {
    let shown = program.display();
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start {shown}: {error}"))?;
    let (send, receive) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        // On a thread, as the pipe stays open while any process that inherited it runs.
        thread::spawn(move || {
            let mut output = Vec::new();
            // What was read before an error is used.
            let _ = stdout.take(1 << 16).read_to_end(&mut output);
            let _ = send.send(output);
        });
    }
    let output = receive.recv_timeout(timeout);
    // It has printed everything, or timed out. A process that has ended cannot be killed.
    let _ = child.kill();
    let _ = child.wait();
    let output = output.map_err(|_| {
        format!(
            "{shown} --version has not exited after {:.1} s",
            timeout.as_secs_f64()
        )
    })?;
    let output = String::from_utf8_lossy(&output);
    let line = output.lines().map(str::trim).find(|line| !line.is_empty());
    line.map(str::to_owned)
        .ok_or_else(|| format!("{shown} --version prints nothing"))
}

#[cfg(test)]
mod tests;
