//! The number of ranks that this machine can start: `--host-discovery-script`.

use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use libc::pid_t;

use crate::launch::error::LaunchError;
use crate::launch::{program, sys};

/// The time that the script has.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The host of the slots: ranks are started on this machine alone.
const HOST: &str = "localhost";

/// The script that prints the slots.
pub struct HostDiscoveryScript {
    path: PathBuf,
    timeout: Duration,
}

impl HostDiscoveryScript {
    /// The script at a path, or of that name on PATH.
    pub fn find(script: &Path) -> Result<Self, LaunchError> {
        Ok(Self {
            path: program::find(script)?,
            timeout: TIMEOUT,
        })
    }

    /// Runs it, and returns the number of slots.
    pub fn slots(&self) -> Result<usize, LaunchError> {
        let text = self.output().map_err(|reason| self.failed(&reason))?;
        parse(&text).map_err(|reason| self.failed(&reason))
    }

    fn output(&self) -> Result<String, String> {
        let mut command = Command::new(&self.path);
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        sys::signal_on_parent_exit(&mut command, libc::SIGKILL);
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let until = Instant::now() + self.timeout;
        let read = read_until(child.stdout.take(), until);
        let status = sys::wait_until(&mut child, until);
        // What it has left running, or itself if it is late.
        sys::kill(-(child.id() as pid_t), libc::SIGKILL);
        let _ = child.wait();
        let late = || format!("it has not ended after {} s", self.timeout.as_secs());
        match status {
            None => Err(late()),
            Some(status) if !status.success() => Err(format!("it failed: {status}")),
            Some(_) => read.ok_or_else(late)?.map_err(|error| error.to_string()),
        }
    }

    fn failed(&self, reason: &str) -> LaunchError {
        let script = self.path.display();
        LaunchError::Discovery(format!("the host discovery script {script}: {reason}"))
    }
}

/// All that a process prints; `None` if its output has not ended at that time.
fn read_until(from: Option<ChildStdout>, until: Instant) -> Option<io::Result<String>> {
    let (send, text) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        let read = from.map(|mut from| from.read_to_string(&mut text));
        let _ = send.send(read.transpose().map(|_| text));
    });
    let left = until.saturating_duration_since(Instant::now());
    text.recv_timeout(left).ok()
}

/// The slots of `localhost:SLOTS`.
fn parse(text: &str) -> Result<usize, String> {
    let mut slots: usize = 0;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (host, count) = line.split_once(':').unwrap_or((line, "1"));
        if host != HOST {
            return Err(format!(
                "it names the host {host:?}, and launch starts ranks on {HOST} alone"
            ));
        }
        let count: usize = count
            .parse()
            .map_err(|_| format!("it prints {line:?}: expected {HOST}:SLOTS, as in {HOST}:4"))?;
        slots = slots.saturating_add(count);
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn slots_are_those_of_this_machine() {
        assert_eq!(parse("localhost:4\n"), Ok(4));
        assert_eq!(parse("localhost\n\n localhost:2 \n"), Ok(3));
        assert_eq!(parse(""), Ok(0));
        let most = format!("localhost:{}\nlocalhost", usize::MAX);
        assert_eq!(parse(&most), Ok(usize::MAX));
        assert!(parse("node2:4").unwrap_err().contains("\"node2\""));
        assert!(
            parse("localhost:x")
                .unwrap_err()
                .contains("localhost:SLOTS")
        );
    }

    #[test]
    fn a_script_that_fails_is_named() {
        let error = HostDiscoveryScript::find(Path::new("/bin/false")).unwrap();
        let error = error.slots().unwrap_err().to_string();
        assert!(
            error.contains("/bin/false: it failed: exit status: 1"),
            "{error}"
        );
        assert!(HostDiscoveryScript::find(Path::new("/no/such/script")).is_err());
    }

    /// One that waits, and one that leaves a process behind with its output.
    #[test]
    fn a_script_that_does_not_end_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("slots.sh");
        for waits in ["sleep 1000", "sleep 1000 &"] {
            fs::write(&path, format!("#!/bin/sh\necho localhost:4\n{waits}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            let script = HostDiscoveryScript {
                timeout: Duration::from_secs(1),
                ..HostDiscoveryScript::find(&path).unwrap()
            };
            let began = Instant::now();
            let error = script.slots().unwrap_err().to_string();
            assert!(error.ends_with("it has not ended after 1 s"), "{error}");
            assert!(began.elapsed() < Duration::from_secs(20));
        }
    }
}
