//! Functions that find NCCL, MPI, the NVIDIA driver and NVRTC on this machine.
//!
//! The crate needs no Cargo feature. Libraries are opened at run time, queried, and closed again.

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

/// The file names of the NCCL library that are tried, in this order.
pub const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The timeout for a program to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

/// The NCCL library that the dynamic linker finds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NcclLibrary {
    /// The major, minor and patch version, for example `(2, 23, 3)`.
    pub version: (u32, u32, u32),
    /// The path of the library file, or the file name that was opened if the system does not report the path.
    pub path: PathBuf,
}

/// The `mpirun` program of Open MPI or another MPI library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct MpirunProgram {
    /// The path of the program.
    pub path: PathBuf,
    /// The first line of the output of `mpirun --version`.
    pub version: String,
}

/// Finds the NCCL library and queries its version. The [file names](NCCL_NAMES) are tried in order.
///
/// # Errors
/// A text that contains, for each file name, the error of the dynamic linker or of the library.
pub fn nccl() -> Result<NcclLibrary, String> {
    first_nccl(&NCCL_NAMES)
}

/// Finds `mpirun` on `PATH` and queries its version.
///
/// # Errors
/// If `mpirun` is not found, does not start, or does not answer within 10 s.
pub fn mpirun() -> Result<MpirunProgram, String> {
    let path = program_on_path("mpirun").ok_or("mpirun not found in PATH")?;
    let version = program_version(&path)?;
    Ok(MpirunProgram { path, version })
}

/// Returns the path of the first executable file named `name` in the folders of `PATH`.
pub fn program_on_path(name: impl AsRef<Path>) -> Option<PathBuf> {
    find(&env::var_os("PATH")?, name)
}

/// Runs `program` with `--version` and returns the first line of the output.
///
/// # Errors
/// If the program does not start, prints nothing, or does not answer within 10 s.
pub fn program_version(program: &Path) -> Result<String, String> {
    version_of(program, VERSION_TIMEOUT)
}

fn first_nccl(names: &[&str]) -> Result<NcclLibrary, String> {
    // SAFETY: nccl.h declares `ncclResult_t ncclGetVersion(int*)`. The result is an int.
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

/// Opens and queries the first library that is found under one of several names. Returns the version and the path of
/// the library, or an error for each name. `query` returns the version and the address of a function of the library.
fn first_library<V>(
    names: &[&str],
    query: impl Fn(&Library) -> Result<(V, usize), Box<dyn Error>>,
) -> Result<(V, PathBuf), Vec<String>> {
    let mut reasons = vec![];
    for name in names {
        // SAFETY: opens an NVIDIA library, which does nothing harmful when it is opened.
        let opened = unsafe { Library::new(name) };
        let found = opened.map_err(Box::from).and_then(|library| {
            let (version, function) = query(&library)?;
            // The file is only mapped while the library is open.
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

/// Decodes the version number that NCCL returns. For example, 22303 means 2.23.3. Up to NCCL 2.8 the numbers were
/// shorter: 2804 means 2.8.4.
fn nccl_version(code: u32) -> (u32, u32, u32) {
    let major = if code < 10_000 { 1_000 } else { 10_000 };
    (code / major, code % major / 100, code % 100)
}

fn number(value: c_int) -> u32 {
    value.try_into().unwrap_or(0)
}

/// Returns the path of the file that is mapped at an address of this process. Only supported on Linux.
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

/// Returns the first executable file with this name in the folders of a `PATH` value.
fn find(folders: &OsStr, name: impl AsRef<Path>) -> Option<PathBuf> {
    let mut programs = env::split_paths(folders).map(|folder| folder.join(&name));
    programs.find(|program| is_program(program))
}

/// Returns whether `path` is an executable file.
#[cfg(unix)]
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;

    fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Returns whether `path` is a file.
#[cfg(not(unix))]
pub fn is_program(path: &Path) -> bool {
    path.is_file()
}

/// Runs a program with `--version` and returns the first line of the output.
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
        // Reads on a thread, because the pipe stays open while any process that inherited it runs.
        thread::spawn(move || {
            let mut output = Vec::new();
            // Output that was read before an error is used.
            let _ = stdout.take(1 << 16).read_to_end(&mut output);
            let _ = send.send(output);
        });
    }
    let output = receive.recv_timeout(timeout);
    // The program has printed its output or timed out. Killing a process that has ended fails, which is ignored.
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
