//! Runs the program for a case. Each command has a deadline, and its end is classified.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Result of a command.
#[derive(Debug, PartialEq)]
pub enum End {
    /// The exit status was 0.
    Complete,
    /// A one-line error ended the command before the first step.
    Refused(String),
    /// The command ended in any other way, which is a finding.
    Wrong(Finding),
}

/// A fault that a case shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    pub kind: Kind,
    pub message: String,
}

/// The kinds of faults, in the order in which they are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The results differ from the results of one rank.
    Differs,
    /// The program panicked.
    Panicked,
    /// The run failed after it had begun, or without an error message.
    Failed,
    /// The program did not end before its deadline.
    TimedOut,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Differs, Self::Panicked, Self::Failed, Self::TimedOut];

    pub fn name(self) -> &'static str {
        match self {
            Self::Differs => "differs",
            Self::Panicked => "panicked",
            Self::Failed => "failed",
            Self::TimedOut => "timed out",
        }
    }
}

impl Finding {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind, message }
    }
}

/// Runs commands of the program in a folder.
pub struct Runner<'a> {
    pub program: &'a Path,
    pub timeout: Duration,
}

impl Runner<'_> {
    /// Runs a command until it ends. Its output is in `NAME.log` and `NAME.out` in the folder.
    pub fn run(&self, folder: &Path, name: &str, args: &[&str]) -> Result<Ended, String> {
        let path = |end: &str| folder.join(format!("{name}.{end}"));
        let create = |end: &str| {
            File::create(path(end)).map_err(|e| format!("{}: {e}", path(end).display()))
        };
        let mut child = Command::new(self.program)
            .args(args)
            .current_dir(folder)
            .stdin(Stdio::null())
            .stdout(create("out")?)
            .stderr(create("log")?)
            .spawn()
            .map_err(|error| format!("{}: {error}", self.program.display()))?;
        let begun = Instant::now();
        let status = loop {
            match child.try_wait() {
                Ok(None) if begun.elapsed() < self.timeout => sleep(Duration::from_millis(2)),
                Ok(None) => {
                    // The process may have just ended.
                    let _ = child.kill();
                    let _ = child.wait();
                    break None;
                }
                Ok(Some(status)) => break Some(status),
                Err(error) => return Err(format!("{}: {error}", self.program.display())),
            }
        };
        Ok(Ended {
            status,
            output: path("out"),
            log: path("log"),
        })
    }
}

/// A command that has ended.
pub struct Ended {
    /// `None` if it was killed at its deadline.
    status: Option<ExitStatus>,
    output: PathBuf,
    log: PathBuf,
}

impl Ended {
    /// Returns the exit code, or `None` if a signal or the deadline ended the command.
    pub fn code(&self) -> Option<i32> {
        self.status.and_then(|status| status.code())
    }

    /// Returns the standard output.
    pub fn output(&self) -> String {
        read(&self.output)
    }

    /// Returns the last lines of the log.
    pub fn messages(&self) -> String {
        last_lines(&read(&self.log))
    }

    /// Classifies the end of a command. `began` states whether the work had begun.
    pub fn classify(&self, began: bool) -> End {
        let log = read(&self.log);
        let wrong = |kind, message: String| End::Wrong(Finding::new(kind, message));
        let Some(status) = self.status else {
            return wrong(Kind::TimedOut, last_lines(&log));
        };
        if let Some(at) = log.find("panicked at") {
            let lines: Vec<_> = log[at..].lines().take(3).collect();
            return wrong(Kind::Panicked, lines.join(" "));
        }
        if status.success() {
            return End::Complete;
        }
        match error_of(&log) {
            Some(error) if !began && matches!(status.code(), Some(1 | 2)) => End::Refused(error),
            Some(error) => wrong(Kind::Failed, format!("{status}: {error}")),
            None => wrong(Kind::Failed, format!("{status}: {}", last_lines(&log))),
        }
    }
}

fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the error message: the last line that begins with `error: `.
fn error_of(log: &str) -> Option<String> {
    let mut lines = log.lines().filter_map(|line| line.strip_prefix("error: "));
    lines.next_back().map(str::to_owned)
}

fn last_lines(log: &str) -> String {
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(3)..].join(" | ")
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    fn end_of(script: &str, began: bool) -> End {
        let folder = TempDir::new("fuzz-run").unwrap();
        let runner = Runner {
            program: Path::new("sh"),
            timeout: Duration::from_millis(300),
        };
        let ended = runner.run(folder.path(), "case", &["-c", script]).unwrap();
        ended.classify(began)
    }

    #[test]
    fn every_end_of_a_command_is_classified() {
        let wrong = |kind, message: &str| End::Wrong(Finding::new(kind, message));
        let refusal = "echo note >&2; echo 'error: heads 3' >&2; exit 1";
        assert_eq!(end_of("exit 0", true), End::Complete);
        assert_eq!(end_of(refusal, false), End::Refused("heads 3".into()));
        assert_eq!(
            end_of(refusal, true),
            wrong(Kind::Failed, "exit status: 1: heads 3")
        );
        assert_eq!(end_of("sleep 20", false), wrong(Kind::TimedOut, ""));
        let panic = "echo \"thread '0' panicked at a.rs:3:\" >&2; echo why >&2; exit 0";
        assert_eq!(
            end_of(panic, true),
            wrong(Kind::Panicked, "panicked at a.rs:3: why")
        );
        let killed = end_of("kill -9 $$", false);
        assert!(
            matches!(&killed, End::Wrong(finding) if finding.kind == Kind::Failed),
            "{killed:?}"
        );
    }
}
