//! Runs a script with a deadline.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::soak::processes::ProcessTag;

static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Result of a script.
#[derive(Debug, PartialEq)]
pub enum Ended {
    /// The script ended with this exit code. If a signal ended it, the code is 128 plus the signal number, as in a shell.
    Code(i32),
    /// The script was killed at the deadline.
    Late,
}

/// Runs `command` until it ends or the deadline passes, and writes its output to the file `log`. On Linux no process
/// of the command is left. The processes stay in the process group of xtask, so that Ctrl-C ends them too.
pub fn run(command: &mut Command, log: &Path, deadline: Duration) -> Result<Ended, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", log.display());
    let output = File::create(log).map_err(failed)?;
    let errors = output.try_clone().map_err(failed)?;
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let tag = ProcessTag::new(format!("docs-{}-{number}", std::process::id()));
    let (name, value) = tag.variable();
    command
        .env(name, value)
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(errors);
    let mut child = command.spawn().map_err(|e| format!("{command:?}: {e}"))?;
    let begun = Instant::now();
    let ended = loop {
        match child.try_wait().map_err(failed)? {
            Some(status) => {
                let by_signal = || 128 + status.signal().unwrap_or_default();
                break Ended::Code(status.code().unwrap_or_else(by_signal));
            }
            None if begun.elapsed() > deadline => break Ended::Late,
            None => sleep(Duration::from_millis(20)),
        }
    };
    if ended == Ended::Late {
        child.kill().map_err(failed)?;
        child.wait().map_err(failed)?;
    }
    tag.end_within(Duration::ZERO);
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::temp::TempDir;

    #[test]
    fn a_script_ends_with_its_code_or_at_the_deadline() {
        let folder = TempDir::new("shell").unwrap();
        let log = folder.path().join("log");
        let run = |script: &str, seconds| {
            let mut command = Command::new("sh");
            let deadline = Duration::from_secs_f64(seconds);
            run(command.args(["-c", script]), &log, deadline).unwrap()
        };
        let text = || std::fs::read_to_string(&log).unwrap();
        assert_eq!(run("echo out; echo err >&2; exit 3", 60.0), Ended::Code(3));
        assert_eq!(text(), "out\nerr\n");
        assert_eq!(run("kill -9 $$", 60.0), Ended::Code(137));
        assert_eq!(run("sleep 600 & echo $!; sleep 600", 1.0), Ended::Late);
        // The background process has ended, or is about to end.
        let status = format!("/proc/{}/environ", text().trim());
        let begun = Instant::now();
        while std::fs::read(&status).is_ok_and(|environment| !environment.is_empty()) {
            assert!(begun.elapsed() < Duration::from_secs(30), "{status}");
            sleep(Duration::from_millis(20));
        }
    }
}
