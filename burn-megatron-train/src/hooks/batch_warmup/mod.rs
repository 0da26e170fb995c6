//! Batch size warm-up: smaller batches in the first steps of a run.

use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod hook;

pub(super) use hook::BatchWarmupHook;

/// The name of the hook.
pub(super) const NAME: &str = "batch_warmup";

/// A part of the batch size warm-up, which sets the global batch size of the first steps of a run (as in GPT-3,
/// arXiv:2005.14165).
///
/// The micro-batch size does not change, so these steps have fewer micro-batches. The order of the samples does not
/// change either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchWarmup {
    /// The end of this part: the first step, counted from 0, that no longer belongs to this part.
    pub until_step: usize,
    /// The number of samples per step, summed over all ranks of the data axis and all micro-batches.
    pub global_batch_size: usize,
}

/// The error for a part of the batch size warm-up that is invalid for the run.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "invalid batch_warmup = {{ until_step = {}, global_batch_size = {} }}: expected {expected}",
    part.until_step, part.global_batch_size
)]
pub struct BatchWarmupError {
    /// The invalid part.
    pub part: BatchWarmup,
    /// The expected values, as text for the message.
    pub expected: String,
}

/// The number of samples of each step of a run.
#[derive(Clone, Debug)]
pub(crate) struct BatchSizes {
    warmup: Vec<BatchWarmup>,
    /// The number of samples per step after the warm-up.
    whole: usize,
}

impl BatchSizes {
    /// Creates the sizes of a run with `whole` samples per step after the warm-up.
    pub fn new(warmup: Vec<BatchWarmup>, whole: usize) -> Self {
        Self { warmup, whole }
    }

    /// Checks the parts of the warm-up in a run of `steps` steps. Divisibility is checked like for the global batch
    /// size.
    pub fn check(&self, steps: usize) -> Result<(), BatchWarmupError> {
        let mut before = BatchWarmup {
            until_step: 0,
            global_batch_size: 0,
        };
        let whole = self.whole;
        for part in &self.warmup {
            let expected = if part.global_batch_size <= before.global_batch_size {
                format!("a batch above {}", before.global_batch_size)
            } else if part.global_batch_size >= whole {
                format!("a batch below {whole}, the global_batch_size")
            } else if part.until_step <= before.until_step {
                format!("until_step above {}", before.until_step)
            } else if part.until_step >= steps {
                format!("until_step below {steps}, the steps of the run")
            } else {
                before = *part;
                continue;
            };
            let part = *part;
            return Err(BatchWarmupError { part, expected });
        }
        Ok(())
    }

    /// Returns the number of samples per step after the warm-up.
    pub fn whole(&self) -> usize {
        self.whole
    }

    /// Returns the number of samples of a step.
    pub fn of(&self, step: usize) -> usize {
        let part = self.warmup.iter().find(|part| step < part.until_step);
        part.map_or(self.whole, |part| part.global_batch_size)
    }

    /// Returns ranges of steps with equal batch size, starting at step `first`, with their sizes.
    fn runs(&self, first: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut start = first;
        let parts = self.warmup.iter();
        let parts = parts.map(|part| (part.until_step, part.global_batch_size));
        let parts = parts.chain([(usize::MAX, self.whole)]);
        parts.filter_map(move |(end, size)| {
            let run = start..end.max(start);
            start = run.end;
            (!run.is_empty()).then_some((run, size))
        })
    }

    /// Returns the number of samples in the given steps.
    pub fn sum(&self, steps: Range<usize>) -> u64 {
        let runs = self.runs(steps.start);
        let samples = runs.map(|(run, size)| {
            let len = run.end.min(steps.end).saturating_sub(run.start);
            len as u64 * size as u64
        });
        samples.sum()
    }

    /// Returns the step that reads a sample. `before` is the number of samples between the start of step `first` and
    /// the sample.
    pub fn step_of(&self, first: usize, mut before: u64) -> usize {
        for (run, size) in self.runs(first) {
            let steps = (before / size as u64) as usize;
            if steps < run.len() {
                return run.start + steps;
            }
            before -= run.len() as u64 * size as u64;
        }
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TrainConfig;
    use burn_megatron::mesh::ParallelConfig;

    fn config(parts: &[(usize, usize)]) -> TrainConfig {
        let parts = parts.iter().map(|(until_step, size)| BatchWarmup {
            until_step: *until_step,
            global_batch_size: *size,
        });
        TrainConfig {
            steps: 9,
            micro_batch_size: 2,
            global_batch_size: 12,
            warmup_steps: 0,
            batch_warmup: parts.collect(),
            ..TrainConfig::default()
        }
    }

    /// Compares the sums with a list of all steps.
    #[test]
    fn each_step_has_the_samples_of_its_part() {
        let sizes = config(&[(2, 4), (5, 8)]).sizes();
        let steps: Vec<_> = (0..7).map(|step| sizes.of(step)).collect();
        assert_eq!(steps, [4, 4, 8, 8, 8, 12, 12]);
        for first in 0..7 {
            for end in first..7 {
                let expected: usize = steps[first..end].iter().sum();
                assert_eq!(sizes.sum(first..end), expected as u64, "{first}..{end}");
            }
            let mut before = 0;
            for (step, size) in steps.iter().enumerate().skip(first) {
                for _ in 0..*size {
                    assert_eq!(sizes.step_of(first, before), step);
                    before += 1;
                }
            }
        }
        let none = config(&[]).sizes();
        assert_eq!(
            (none.of(0), none.sum(3..5), none.step_of(2, 24)),
            (12, 24, 4)
        );
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        let check = |parts| {
            let layout = ParallelConfig::new().with_data(2);
            let found = config(parts).check(&layout, 16);
            found.map_err(|error| error.to_string())
        };
        assert_eq!(check(&[(2, 4), (5, 8)]), Ok(()));
        let refused = |parts, part, expected| {
            let expected = format!("invalid batch_warmup = {{ {part} }}: expected {expected}");
            assert_eq!(check(parts), Err(expected));
        };
        refused(
            &[(2, 12)],
            "until_step = 2, global_batch_size = 12",
            "a batch below 12, the global_batch_size",
        );
        refused(
            &[(2, 0)],
            "until_step = 2, global_batch_size = 0",
            "a batch above 0",
        );
        refused(
            &[(2, 8), (3, 4)],
            "until_step = 3, global_batch_size = 4",
            "a batch above 8",
        );
        refused(
            &[(2, 4), (2, 8)],
            "until_step = 2, global_batch_size = 8",
            "until_step above 2",
        );
        refused(
            &[(9, 4)],
            "until_step = 9, global_batch_size = 4",
            "until_step below 9, the steps of the run",
        );
        // Two ranks with micro-batches of 2 samples.
        let refused = check(&[(2, 6)]).unwrap_err();
        assert!(refused.contains("the micro-batch size 2"), "{refused}");
    }
}
