//! The guard: a process that kills the ranks and all their child processes when the launcher dies.
//!
//! The guard reads the process group ids of the ranks from a pipe. The pipe closes whenever the launcher exits, for
//! any reason. The system's own mechanism (`PR_SET_PDEATHSIG`) would end only the ranks, not the processes that they
//! started.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::unistd::Pid;

use super::sys;

/// The script of the guard. Only SIGKILL ends the script before its pipe closes. Groups that no longer exist are not
/// an error.
const SCRIPT: &str = "trap '' HUP INT TERM
while read -r group; do groups=\"$groups -$group\"; done
[ -z \"$groups\" ] || kill -s KILL -- $groups";

/// Running guard process.
pub struct Guard(Child);

impl Guard {
    /// Starts the guard.
    pub fn start() -> io::Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT]);
        // In its own process group, the guard does not receive Ctrl-C from a terminal.
        command.process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Returns the process id of the guard.
    pub fn pid(&self) -> Pid {
        sys::pid(&self.0)
    }

    /// Adds a process group.
    pub fn add(&mut self, group: Pid) {
        if let Some(pipe) = &mut self.0.stdin {
            // Writing fails if the guard has been killed. The exit of the guard ends the run.
            let _ = writeln!(pipe, "{group}");
        }
    }

    /// Ends the guard without killing the groups.
    pub fn end(mut self) {
        // The guard is killed before its pipe closes. It may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
