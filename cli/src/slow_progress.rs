//! Progress output on standard error for work that may take long.

use std::io::{self, IsTerminal};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::terminal::bar_style;

/// Progress bar on a terminal, or a line at intervals for other outputs. Work that ends before the first line prints
/// nothing.
pub struct SlowProgress {
    bar: Option<ProgressBar>,
    /// The time before the first line, and between two lines.
    interval: Duration,
    shown: Mutex<Instant>,
}

impl SlowProgress {
    /// Creates a progress bar with this indicatif template, or lines at this interval.
    pub fn new(template: &'static str, interval: Duration) -> Self {
        let bar = || ProgressBar::new(0).with_style(bar_style(template).progress_chars("━╸─"));
        Self {
            bar: io::stderr().is_terminal().then(bar),
            interval,
            shown: Mutex::new(Instant::now()),
        }
    }

    /// Shows that `done` of `all` units are done, with a text.
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

/// The duration after which a phase is shown.
const PHASE_DELAY: Duration = Duration::from_secs(3);

/// Runs a phase that reports no progress. After 3 s, a terminal shows a spinner with the name and the elapsed time. A
/// file or pipe gets one line.
pub fn phase<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    let (running, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            if ended.recv_timeout(PHASE_DELAY) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            if !io::stderr().is_terminal() {
                eprintln!("{name} ...");
                return;
            }
            let spinner = ProgressBar::new_spinner()
                .with_style(bar_style("{spinner} {msg} ({elapsed})"))
                .with_message(name)
                .with_elapsed(PHASE_DELAY);
            spinner.enable_steady_tick(Duration::from_millis(200));
            // The sender is dropped at the end of the phase, even after a panic.
            let _ = ended.recv();
            spinner.finish_and_clear();
        });
        let result = work();
        drop(running);
        result
    })
}
