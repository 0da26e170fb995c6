//! Records the attempts at a job: `restarts.jsonl` in the run folder, and the closing table.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use burn_megatron::regular_file::open_output;
use burn_megatron::text_table::Table;
use serde::Serialize;

use crate::terminal;

/// The name of the file in the run folder.
const FILE: &str = "restarts.jsonl";

/// Record of an attempt at the job, after its end.
#[derive(Clone, Debug, Serialize)]
pub struct AttemptRecord {
    /// The number of the attempt, from 0.
    pub attempt: usize,
    /// The id of the world.
    pub job: String,
    pub ranks: usize,
    /// The step after which the attempt began. `to_step` is the step after which it ended. Both are `None` if
    /// unknown.
    pub from_step: Option<u64>,
    pub to_step: Option<u64>,
    /// The duration in seconds.
    pub seconds: f64,
    /// The verdict on the end of the attempt.
    pub verdict: &'static str,
    /// The exit status of the rank that failed first.
    pub cause: String,
    /// The failure report of that rank.
    pub report: Option<String>,
    /// The decision after the attempt.
    pub next: String,
}

/// Log of the attempts at a job.
pub struct AttemptLog {
    folder: Option<PathBuf>,
    attempts: Vec<AttemptRecord>,
    /// The number of attempts that are already in the file.
    written: usize,
}

impl AttemptLog {
    /// Creates the log of a job. It is written to the run folder, if the job has one.
    pub fn new(folder: Option<&Path>) -> Self {
        Self {
            folder: folder.map(Path::to_owned),
            attempts: vec![],
            written: 0,
        }
    }

    /// Adds an attempt. If the file cannot be written, prints a warning and continues.
    pub fn add(&mut self, attempt: AttemptRecord) {
        self.attempts.push(attempt);
        // If the folder contains no run yet, do not write to it: `pretrain` refuses a folder that is not empty.
        let begun = |folder: &&PathBuf| folder.join("config.toml").is_file();
        let Some(path) = self
            .folder
            .as_ref()
            .filter(begun)
            .map(|folder| folder.join(FILE))
        else {
            return;
        };
        match append(&path, &self.attempts[self.written..]) {
            Ok(()) => self.written = self.attempts.len(),
            Err(error) => eprintln!("warning: cannot write {}: {error}", path.display()),
        }
    }

    /// Returns a table of all attempts if there are several.
    pub fn summary(&self) -> Option<String> {
        if self.attempts.len() < 2 {
            return None;
        }
        let header = ["attempt", "ranks", "steps", "seconds", "ended"].map(str::to_owned);
        let rows = self.attempts.iter().map(|attempt| {
            let steps = match (attempt.from_step, attempt.to_step) {
                (Some(from), Some(to)) if to > from => format!("{} to {to}", from + 1),
                (Some(_), Some(_)) => "none".into(),
                _ => "unknown".into(),
            };
            vec![
                attempt.attempt.to_string(),
                attempt.ranks.to_string(),
                steps,
                format!("{:.1}", attempt.seconds),
                attempt.cause.clone(),
            ]
        });
        let rows = std::iter::once(header.to_vec()).chain(rows);
        let table = Table::new(rows).with_left([0, 4]).with_optional([3]);
        Some(table.fit(terminal::width()))
    }
}

fn append(path: &Path, attempts: &[AttemptRecord]) -> io::Result<()> {
    let mut lines = Vec::new();
    for attempt in attempts {
        serde_json::to_writer(&mut lines, attempt)?;
        lines.push(b'\n');
    }
    let mut file = open_output(path, File::options().append(true).create(true))?;
    file.write_all(&lines)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(attempt: usize, from: u64, to: u64) -> AttemptRecord {
        AttemptRecord {
            attempt,
            job: format!("a.{attempt}"),
            ranks: 4,
            from_step: Some(from),
            to_step: Some(to),
            seconds: 1.25,
            verdict: "signal",
            cause: "rank 1 ended by signal 9 (SIGKILL)".into(),
            report: None,
            next: "restart".into(),
        }
    }

    #[test]
    fn the_attempts_are_written_once_there_is_a_run() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let mut log = AttemptLog::new(Some(&run));
        log.add(record(0, 0, 0));
        assert!(!run.exists() && log.summary().is_none());
        std::fs::create_dir(&run).unwrap();
        std::fs::write(run.join("config.toml"), "").unwrap();
        log.add(record(1, 0, 12));
        log.add(record(2, 10, 12));
        let text = std::fs::read_to_string(run.join(FILE)).unwrap();
        let numbers: Vec<_> = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|line| (line["attempt"].clone(), line["to_step"].clone()))
            .collect();
        assert_eq!(
            numbers,
            [
                (0.into(), 0.into()),
                (1.into(), 12.into()),
                (2.into(), 12.into())
            ]
        );
        let table = log.summary().unwrap();
        let rows: Vec<_> = table.lines().collect();
        assert_eq!(rows.len(), 4, "{table}");
        assert!(
            rows[1].contains("none") && rows[2].contains("1 to 12"),
            "{table}"
        );
        assert!(
            rows[3].ends_with("rank 1 ended by signal 9 (SIGKILL)"),
            "{table}"
        );
    }
}
