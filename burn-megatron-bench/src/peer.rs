//! A Python program that a benchmark runs in alternation with its own work.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use burn_megatron_cli::internal::Error;

/// A process that prints "ready NAME" and then answers each line with one line.
pub struct Peer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// The name of the program, including versions.
    pub name: String,
}

impl Peer {
    /// Starts `program`, the source of a Python program, with `settings` as its argument.
    pub fn start(python: &Path, program: &str, settings: &Value) -> Result<Self, Error> {
        let mut child = Command::new(python)
            .args(["-c", program, &settings.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", python.display()))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both are piped")
        };
        let mut peer = Self {
            child,
            to,
            from: BufReader::new(from),
            name: String::new(),
        };
        let line = peer.line()?;
        peer.name = line.strip_prefix("ready ").unwrap_or(&line).to_string();
        Ok(peer)
    }

    /// Returns the answer to one request.
    pub fn ask(&mut self, request: &Value) -> Result<Value, Error> {
        writeln!(self.to, "{request}")?;
        Ok(serde_json::from_str(&self.line()?)?)
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        match self.from.read_line(&mut line)? {
            0 => Err("the Python process ended; its error is printed above".into()),
            _ => Ok(line.trim().to_string()),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
