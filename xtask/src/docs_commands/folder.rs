//! The folder in which the commands of a page run. It resembles a checkout in which everything is built.

use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::shell::{self, Ended};
use crate::process::copy_folder;
use crate::temp::TempDir;

/// A script that replaces cargo.
const CARGO: &str = include_str!("cargo.sh");

/// The number of lines of a failed command that are shown.
const LINES: usize = 15;

/// The folder that commands write to. The other folders of the checkout are links.
const WRITTEN: &str = "docs";

/// The paths that git ignores at the top of the repository. They hold results of earlier commands.
const RESULTS: [&str; 4] = ["target", "runs", "gpu-results", ".git"];

pub struct PageFolder {
    temp: TempDir,
    root: PathBuf,
    programs: PathBuf,
}

impl PageFolder {
    /// Makes a folder with the files of the checkout at `root`. Its commands find the programs in `programs`.
    pub fn new(temp: TempDir, root: &Path, programs: &Path) -> Result<Self, String> {
        let folder = Self {
            temp,
            root: root.into(),
            programs: programs.into(),
        };
        folder
            .fill()
            .map_err(|e| format!("{}: {e}", folder.temp.path().display()))?;
        Ok(folder)
    }

    fn work(&self) -> PathBuf {
        self.temp.path().join("work")
    }

    fn log(&self) -> PathBuf {
        self.temp.path().join("log")
    }

    fn fill(&self) -> std::io::Result<()> {
        let (work, bin) = (self.work(), self.temp.path().join("bin"));
        fs::create_dir(&work)?;
        fs::create_dir(&bin)?;
        let cargo = bin.join("cargo");
        fs::write(&cargo, CARGO)?;
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755))?;
        fs::create_dir(work.join("target"))?;
        symlink(&self.programs, work.join("target/release"))?;
        for entry in fs::read_dir(&self.root)? {
            let (path, name) = entry.map(|entry| (entry.path(), entry.file_name()))?;
            if name == WRITTEN {
                copy_folder(&path, &work.join(name)).map_err(std::io::Error::other)?;
            } else if !RESULTS.iter().any(|result| name == *result) {
                symlink(path, work.join(name))?;
            }
        }
        Ok(())
    }

    /// Runs a script without changes.
    pub fn run(&self, script: &str, deadline: Duration) -> Result<Ended, String> {
        let own = [self.temp.path().join("bin"), self.programs.clone()];
        let path = env::var_os("PATH").unwrap_or_default();
        let path = env::join_paths(own.into_iter().chain(env::split_paths(&path)));
        let mut command = Command::new("bash");
        command
            .args(["-e", "-c", script])
            .current_dir(self.work())
            .env("PATH", path.map_err(|e| format!("PATH: {e}"))?)
            .env("PROGRAMS", &self.programs)
            .env("REPOSITORY", &self.root)
            .env(
                "CARGO",
                env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
            )
            // mpirun refuses to run as root, and containers run as root.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        shell::run(&mut command, &self.log(), deadline)
    }

    /// Returns the end of the output of the last script.
    pub fn last_lines(&self) -> String {
        let text = fs::read(self.log()).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES)..].join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_run_in_a_checkout_with_built_programs() {
        let root = TempDir::new("root").unwrap();
        root.write("docs/src/page.md", "text");
        root.write("cli/tiny.toml", "recipe");
        root.write("target/old", "");
        let programs = root.path().join("programs");
        for name in ["burn-megatron", "burn-megatron-bench"] {
            root.write(&format!("programs/{name}"), "#!/bin/sh\necho \"ran $*\"\n");
            let program = programs.join(name);
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let folder =
            PageFolder::new(TempDir::new("docs").unwrap(), root.path(), &programs).unwrap();
        let run = |script: &str| {
            let ended = folder.run(script, Duration::from_secs(60)).unwrap();
            (ended, folder.last_lines())
        };
        for command in [
            "cargo run --release --features mpi -- verify 'a b'",
            "burn-megatron verify 'a b'",
            "cargo run --release -p burn-megatron-bench -- verify 'a b'",
        ] {
            assert_eq!(run(command), (Ended::Code(0), "ran verify a b".into()));
        }
        // Written files do not change the checkout.
        assert_eq!(
            run("cat cli/tiny.toml; echo new > docs/src/page.md").1,
            "recipe"
        );
        assert_eq!(
            fs::read_to_string(root.path().join("docs/src/page.md")).unwrap(),
            "text"
        );
        assert_eq!(run("ls target/old").0, Ended::Code(2));
        assert_eq!(
            run("cargo build --release --features mpi; target/release/burn-megatron x").1,
            "ran x"
        );
        assert_eq!(run("false\ntrue").0, Ended::Code(1));
    }
}
