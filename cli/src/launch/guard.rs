//! The guard: a process that outlives the launcher, and kills the ranks and all that they started when it dies.
//!
//! It reads the numbers of the ranks' process groups from a pipe. The pipe closes when the launcher exits, however it
//! does. The system alone (`PR_SET_PDEATHSIG`) would end the ranks, not the processes that they started.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::unistd::Pid;

use super::sys;

/// Nothing but SIGKILL ends it before its pipe closes. Groups that are gone are no error.
const SCRIPT: &str = "trap '' HUP INT TERM
while read -r group; do groups=\"$groups -$group\"; done
[ -z \"$groups\" ] || kill -s KILL -- $groups";

/// A running guard.
pub struct Guard(Child);

impl Guard {
    /// Starts it.
    pub fn start() -> io::Result<Self> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", SCRIPT]);
        // Ctrl-C in a terminal goes to the launcher alone.
        command.process_group(0);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command.spawn().map(Self)
    }

    /// Its process id.
    pub fn pid(&self) -> Pid {
        sys::pid(&self.0)
    }

    /// Adds a process group.
    pub fn add(&mut self, group: Pid) {
        if let Some(pipe) = &mut self.0.stdin {
            // Writing fails once the guard has been killed, which ends the run.
            let _ = writeln!(pipe, "{group}");
        }
    }

    /// Ends it, without killing the groups.
    pub fn end(mut self) {
        // Killed before its pipe closes. It may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
