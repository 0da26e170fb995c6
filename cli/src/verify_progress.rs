//! Progress of verifying the checkpoint that a run is about to resume from.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use burn_megatron::checkpoint::Checkpoint;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Time between two lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows the progress on standard error: a bar on a terminal, elsewhere a line every ten seconds, so that small
/// checkpoints print nothing.
pub struct VerifyProgress {
    bar: Option<ProgressBar>,
    /// The step of the checkpoint, and how many of its bytes were read.
    step: u64,
    read: u64,
    shown: Instant,
}

impl Default for VerifyProgress {
    fn default() -> Self {
        Self {
            bar: io::stderr().is_terminal().then(bar),
            step: 0,
            read: 0,
            shown: Instant::now(),
        }
    }
}

impl VerifyProgress {
    /// Adds bytes that were read.
    pub fn show(&mut self, checkpoint: &Checkpoint, bytes: u64) {
        let (step, total) = (checkpoint.metadata().step, checkpoint.totals().bytes);
        let before = if self.step == step { self.read } else { 0 };
        (self.step, self.read) = (step, before + bytes);
        match &self.bar {
            Some(bar) => {
                bar.set_message(line(step, self.read, total));
                bar.set_length(total);
                bar.set_position(self.read);
            }
            None if self.shown.elapsed() >= LINE_INTERVAL => {
                eprintln!("{}", line(step, self.read, total));
                self.shown = Instant::now();
            }
            None => {}
        }
    }
}

impl Drop for VerifyProgress {
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
    let total = HumanBytes(total);
    format!("checking the checkpoint of step {step}: {part:.0} % of {total}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        assert_eq!(
            line(400, 12 << 30, 48 << 30),
            "checking the checkpoint of step 400: 25 % of 48.00 GiB"
        );
        assert!(line(0, 0, 0).contains("0 %"));
    }
}
