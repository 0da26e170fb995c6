//! Progress of verifying the checkpoint from which a run is about to resume.

use std::time::Duration;

use burn_megatron::checkpoint::Checkpoint;
use indicatif::HumanBytes;

use crate::slow_progress::SlowProgress;

/// Progress of the verification. Small checkpoints print nothing.
pub struct VerifyProgress {
    progress: SlowProgress,
    /// The step of the checkpoint. `read` counts the bytes of the checkpoint that were read.
    step: u64,
    read: u64,
}

impl Default for VerifyProgress {
    fn default() -> Self {
        let template = "{bar:10.cyan/blue} ETA {eta}  {wide_msg}";
        Self {
            progress: SlowProgress::new(template, Duration::from_secs(10)),
            step: 0,
            read: 0,
        }
    }
}

impl VerifyProgress {
    /// Adds the number of bytes that were read, and shows the progress.
    pub fn show(&mut self, checkpoint: &Checkpoint, bytes: u64) {
        let (step, total) = (checkpoint.metadata().step, checkpoint.totals().bytes);
        let before = if self.step == step { self.read } else { 0 };
        (self.step, self.read) = (step, before + bytes);
        self.progress
            .show(self.read, total, line(step, self.read, total));
    }
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
        insta::assert_snapshot!(
            line(400, 12 << 30, 48 << 30),
            @"checking the checkpoint of step 400: 25 % of 48.00 GiB"
        );
        assert!(line(0, 0, 0).contains("0 %"));
    }
}
