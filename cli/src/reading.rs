//! How far the check of a checkpoint is that a run is about to go on from.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use burn_megatron::checkpoint::Checkpoint;
use indicatif::{DecimalBytes, ProgressBar, ProgressStyle};

/// Between two lines where there is no terminal.
const LINES: Duration = Duration::from_secs(10);

/// Shows it on standard error: as a bar on a terminal, elsewhere in a line every ten seconds, so that small
/// checkpoints are checked without a word.
pub struct Reading {
    bar: Option<ProgressBar>,
    /// The step that is read, and how many of its bytes were.
    step: u64,
    read: u64,
    shown: Instant,
}

impl Default for Reading {
    fn default() -> Self {
        Self {
            bar: io::stderr().is_terminal().then(bar),
            step: 0,
            read: 0,
            shown: Instant::now(),
        }
    }
}

impl Reading {
    /// Shows that so many more bytes were read.
    pub fn show(&mut self, checkpoint: &Checkpoint, bytes: u64) {
        let (step, total) = (checkpoint.about().step, checkpoint.totals().bytes);
        let before = if self.step == step { self.read } else { 0 };
        (self.step, self.read) = (step, before + bytes);
        match &self.bar {
            Some(bar) => {
                bar.set_message(line(step, self.read, total));
                bar.set_length(total);
                bar.set_position(self.read);
            }
            None if self.shown.elapsed() >= LINES => {
                eprintln!("{}", line(step, self.read, total));
                self.shown = Instant::now();
            }
            None => {}
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:10.cyan/blue} ETA {eta}  {wide_msg}");
    let style = style.expect("the template is a constant");
    ProgressBar::new(0).with_style(style.progress_chars("━╸─"))
}

fn line(step: u64, read: u64, total: u64) -> String {
    let part = 100.0 * read as f64 / total.max(1) as f64;
    let total = DecimalBytes(total);
    format!("checking the checkpoint of step {step}: {part:.0} % of {total}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        assert_eq!(
            line(400, 12_050_000_000, 48_200_000_000),
            "checking the checkpoint of step 400: 25 % of 48.20 GB"
        );
        assert!(line(0, 0, 0).contains("0 %"));
    }
}
