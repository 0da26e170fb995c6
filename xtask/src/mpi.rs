//! Finds or installs the libraries and programs of the engine `mpi`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use crate::apt;

/// The features that enable the engine. They do not change the build of Burn.
pub const FEATURES: &str =
    "burn-megatron-tests/mpi,burn-megatron-cli/mpi,burn-megatron-learner/mpi";

/// `iproute2` provides `ip`, which the tests with several hosts use to create networks.
const PACKAGES: &[&str] = &["libopenmpi-dev", "openmpi-bin", "libclang-dev", "iproute2"];

const ADVICE: &str = "
  Debian, Ubuntu:  sudo apt-get install libopenmpi-dev openmpi-bin libclang-dev
  Fedora:          sudo dnf install openmpi-devel clang-devel, then: module load mpi
  Arch:            sudo pacman -S openmpi clang";

/// Finds MPI, or installs it where possible. The error lists the missing parts and how to install them.
pub fn find_or_install() -> Result<(), String> {
    let missing = missing();
    if missing.is_empty() {
        println!("found mpicc, mpirun and libclang");
        return Ok(());
    }
    if !apt::may_install() {
        return Err(explain(&missing));
    }
    apt::install(PACKAGES).map_err(|reason| format!("{}\n{reason}", explain(&missing)))?;
    match self::missing() {
        none if none.is_empty() => Ok(()),
        missing => Err(explain(&missing)),
    }
}

/// Returns the missing parts. The list is empty if the engine can be built and run.
pub fn missing() -> Vec<&'static str> {
    let wanted = [
        ("mpicc", answers("mpicc")),
        ("mpirun", answers("mpirun")),
        (
            "libclang",
            has_libclang(
                Path::new("/"),
                env::var_os("LIBCLANG_PATH").map(PathBuf::from),
            ),
        ),
    ];
    let missing = wanted.into_iter().filter(|(_, there)| !there);
    missing.map(|(name, _)| name).collect()
}

fn explain(missing: &[&str]) -> String {
    format!(
        "the engine mpi needs {}, which are missing here{ADVICE}",
        missing.join(" and ")
    )
}

fn answers(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null());
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Returns whether libclang, which parses the MPI header, is installed.
fn has_libclang(root: &Path, named: Option<PathBuf>) -> bool {
    let is_clang = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libclang") && !name.starts_with("libclang-cpp") && name.contains(".so")
    };
    let holds = |folder: &Path| entries(folder).iter().any(|path| is_clang(path));
    if let Some(named) = named {
        return is_clang(&named) || holds(&named);
    }
    let libraries = ["usr/lib", "usr/lib64", "usr/local/lib"].map(|folder| root.join(folder));
    libraries.iter().any(|folder| {
        // Debian keeps libraries in a subfolder for the architecture, and LLVM libraries in a folder below it.
        let inner = entries(folder);
        holds(folder)
            || inner
                .iter()
                .any(|path| holds(path) || holds(&path.join("lib")))
    })
}

/// Returns the paths in a folder, or no paths if the folder does not exist.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = fs::read_dir(folder).into_iter().flatten().flatten();
    read.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn libclang_is_found_where_it_is_installed() {
        let root = TempDir::new("libclang").unwrap();
        assert!(!has_libclang(root.path(), None));
        root.write("usr/lib/x86_64-linux-gnu/libclang-cpp.so.14", "");
        assert!(!has_libclang(root.path(), None));
        root.write("usr/lib/llvm-14/lib/libclang-14.so.1", "");
        assert!(has_libclang(root.path(), None));
        root.write("mine/libclang.so", "");
        let mine = root.path().join("mine");
        assert!(has_libclang(Path::new("/nowhere"), Some(mine.clone())));
        assert!(has_libclang(
            Path::new("/nowhere"),
            Some(mine.join("libclang.so"))
        ));
        assert!(!has_libclang(root.path(), Some(root.path().join("empty"))));
    }

    #[test]
    fn what_is_missing_is_explained() {
        let text = explain(&["mpicc", "libclang"]);
        assert!(
            text.starts_with("the engine mpi needs mpicc and libclang, which are"),
            "{text}"
        );
        assert!(!answers("no-such-program-anywhere"));
    }
}
