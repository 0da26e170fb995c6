//! Progress on standard error of what may take long.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::terminal::bar_style;

/// A bar on a terminal, elsewhere a line from time to time. What ends before the first line prints nothing.
pub struct SlowProgress {
    bar: Option<ProgressBar>,
    /// The time before the first line, and between two lines.
    interval: Duration,
    shown: Mutex<Instant>,
}

impl SlowProgress {
    /// Begins with a bar of this template of indicatif, or with lines at this interval.
    pub fn new(template: &'static str, interval: Duration) -> Self {
        let bar = || ProgressBar::new(0).with_style(bar_style(template).progress_chars("━╸─"));
        Self {
            bar: io::stderr().is_terminal().then(bar),
            interval,
            shown: Mutex::new(Instant::now()),
        }
    }

    /// Shows that `done` of `all` are done, with a text.
    pub fn show(&self, done: u64, all: u64, line: String) {
        if let Some(bar) = &self.bar {
            bar.set_message(line);
            bar.set_length(all);
            bar.set_position(done);
            return;
        }
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        if shown.elapsed() >= self.interval {
            eprintln!("{line}");
            *shown = Instant::now();
        }
    }
}

impl Drop for SlowProgress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
