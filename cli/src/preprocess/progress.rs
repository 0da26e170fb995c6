//! Progress of preprocessing.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::numbers::count;
use crate::terminal::bar_style;

/// The time between two lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Progress output on standard error: a bar on a terminal, or a line every ten seconds for other outputs.
pub struct PreprocessProgress {
    bar: Option<ProgressBar>,
    /// The number of bytes of all inputs, if known.
    total: Option<u64>,
    started: Instant,
    shown: Instant,
}

impl PreprocessProgress {
    /// Creates the progress, and starts the clock.
    pub fn start(total: Option<u64>) -> Self {
        let bar = io::stderr().is_terminal().then(|| match total {
            Some(total) => {
                let style = "{percent:>3}% {bar:20.cyan/blue} ETA {eta}  {wide_msg}";
                ProgressBar::new(total).with_style(bar_style(style).progress_chars("━╸─"))
            }
            None => ProgressBar::new_spinner().with_style(bar_style("{spinner} {wide_msg}")),
        });
        Self {
            bar,
            total,
            started: Instant::now(),
            shown: Instant::now(),
        }
    }

    /// Returns the seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Shows that `bytes` were read and `tokens` were written.
    pub fn show(&mut self, bytes: u64, tokens: u64) {
        let message = || format!("{}  {}", speed(bytes, self.seconds()), tokens_of(tokens));
        match (&self.bar, self.total) {
            (Some(bar), _) => {
                bar.set_message(message());
                bar.set_position(bytes);
            }
            (None, total) if self.shown.elapsed() >= LINE_INTERVAL => {
                let part = total.map(|total| 100.0 * bytes as f64 / total.max(1) as f64);
                let part = part.map(|part| format!("{part:.0}%  ")).unwrap_or_default();
                eprintln!("{part}{}", message());
                self.shown = Instant::now();
            }
            (None, _) => {}
        }
    }

    /// Removes the progress bar.
    pub fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Formats a speed in MB/s (10^6 bytes per second).
pub fn speed(bytes: u64, seconds: f64) -> String {
    format!("{:.1} MB/s", bytes as f64 / 1e6 / seconds.max(1e-9))
}

fn tokens_of(tokens: u64) -> String {
    count(tokens as usize, "token")
}
