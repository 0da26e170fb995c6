//! Runs a check in a separate process.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use super::outcome::Findings;
use crate::error::Error;

/// Maximum number of bytes that are read from each output of a process.
const MOST: u64 = 1 << 24;

/// The number of lines of standard error in a reason.
const LINES: usize = 6;

/// Runs a check. Returns the findings from the last line of its output or a description of the failure, and the
/// duration.
pub fn findings(
    arguments: &[&str],
    limit: Duration,
) -> Result<(Result<Findings, String>, Duration), Error> {
    let started = Instant::now();
    let found = output(arguments, limit)?.and_then(|out| {
        let last = out.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|error| format!("no findings: {error}"))
    });
    Ok((found, started.elapsed()))
}

/// Runs this program with `arguments`. Returns its output or a description of the failure. A process that runs longer
/// than `limit` is killed.
pub fn output(arguments: &[&str], limit: Duration) -> Result<Result<String, String>, Error> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let out = child.stdout.take().map(read);
    let err = child.stderr.take().map(read);
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() >= deadline => break None,
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    if status.is_none() {
        // Killing fails if the process has ended in the meantime.
        let _ = child.kill();
        let _ = child.wait();
    }
    // A grandchild may keep the pipes open.
    let text = |pipe: Option<mpsc::Receiver<String>>| {
        let received = pipe.map(|pipe| pipe.recv_timeout(Duration::from_secs(2)));
        received.and_then(Result::ok).unwrap_or_default()
    };
    let (out, err) = (text(out), text(err));
    let failed = match status {
        Some(status) if status.success() => return Ok(Ok(out)),
        Some(status) => status.to_string(),
        None => format!("no result after {} s", limit.as_secs_f64()),
    };
    Ok(Err(match end(&err) {
        end if end.is_empty() => failed,
        end => format!("{failed}: {end}"),
    }))
}

/// Reads a pipe to its end in a thread.
fn read(pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let mut bytes = vec![];
        // Data that was read before an error is used.
        let _ = pipe.take(MOST).read_to_end(&mut bytes);
        let _ = send.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receive
}

/// Returns the error or the panic message in a text, or else the end of the text.
fn end(text: &str) -> String {
    let lines: Vec<_> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let said = |line: &&str| line.starts_with("error: ") || line.contains(" panicked at ");
    let from = lines.iter().position(said);
    let from = from.unwrap_or(lines.len().saturating_sub(LINES));
    let lines = lines[from..].iter().take(LINES);
    let lines = lines.take_while(|line| !line.starts_with("stack backtrace"));
    lines.copied().collect::<Vec<_>>().join("\n    ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_process_is_its_error_or_panic() {
        let panicked =
            "a warning\n\nthread 'main' panicked at a.rs:1:2:\nno\nstack backtrace:\n  0: f";
        assert_eq!(end(panicked), "thread 'main' panicked at a.rs:1:2:\n    no");
        assert_eq!(end("a warning\nerror: no GPU\n"), "error: no GPU");
        assert_eq!(
            end("1\n2\n3\n4\n5\n6\n7"),
            "2\n    3\n    4\n    5\n    6\n    7"
        );
    }
}
