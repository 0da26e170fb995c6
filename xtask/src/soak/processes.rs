//! Finds the processes of a command by an environment variable that they inherit.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

const TAG_VARIABLE: &str = "BURN_MEGATRON_SOAK";

/// The tag of the processes of a run.
pub struct ProcessTag(String);

impl ProcessTag {
    pub fn new(name: String) -> Self {
        Self(name)
    }

    /// Returns the environment variable to set for the command.
    pub fn variable(&self) -> (&'static str, &str) {
        (TAG_VARIABLE, &self.0)
    }

    /// Returns the ids of the running processes, in order.
    pub fn processes(&self) -> Vec<i32> {
        let wanted = format!("{TAG_VARIABLE}={}", self.0);
        let own = |entry: fs::DirEntry| {
            let process: i32 = entry.file_name().to_str()?.parse().ok()?;
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let mut pairs = environment.split(|byte| *byte == 0);
            pairs
                .any(|pair| pair == wanted.as_bytes())
                .then_some(process)
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let mut found: Vec<_> = entries.filter_map(own).collect();
        found.sort_unstable();
        found
    }

    /// Waits until no process is left. After the timeout, kills the remaining processes and returns their number.
    pub fn end_within(&self, timeout: Duration) -> usize {
        let begun = Instant::now();
        let mut left = self.processes();
        while !left.is_empty() && begun.elapsed() < timeout {
            sleep(Duration::from_millis(20));
            left = self.processes();
        }
        for process in &left {
            signal(*process, libc::SIGKILL);
        }
        left.len()
    }
}

/// Sends a signal to a process of a run. The signal is ignored if the process has exited.
pub fn signal(process: i32, signal: i32) {
    // SAFETY: the number is the id of a process that had the mark.
    unsafe { libc::kill(process, signal) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_has_the_mark_is_found_and_ended() {
        let mark = ProcessTag::new(format!("test-{}", std::process::id()));
        let (name, value) = mark.variable();
        let mut child = Command::new("sleep")
            .arg("60")
            .env(name, value)
            .spawn()
            .unwrap();
        let other = ProcessTag::new(format!("test-{}-other", std::process::id()));
        while mark.processes() != [child.id() as i32] {
            sleep(Duration::from_millis(2));
        }
        assert_eq!(other.end_within(Duration::ZERO), 0);
        assert_eq!(mark.end_within(Duration::ZERO), 1);
        assert!(!child.wait().unwrap().success());
        assert_eq!(mark.end_within(Duration::ZERO), 0);
    }
}
