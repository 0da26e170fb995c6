//! Sequence length warm-up: shorter sequences in the first steps of a run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod hook;

pub(super) use hook::SequenceWarmupHook;

/// The name of the hook.
pub(super) const NAME: &str = "sequence_warmup";

/// A part of the sequence length warm-up, which sets the sequence length of the first steps of a run (Li et al. 2021,
/// arXiv:2108.06084).
///
/// A sample of `sequence_length` tokens is cut into sequences of `length` tokens. Each token is read once, in the same
/// order, and a step has the same number of tokens. In each of these sequences, positions start at 0, and attention is
/// limited to the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SequenceWarmup {
    /// The end of this part: the first step, counted from 0, that no longer belongs to this part.
    pub until_step: usize,
    /// The number of tokens per sequence.
    pub length: usize,
}

/// The error for a part of the sequence length warm-up that is invalid for the run.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "invalid sequence_warmup of {} tokens until_step {}, for sequences of {whole}: expected {expected}",
    part.length, part.until_step
)]
pub struct SequenceWarmupError {
    /// The invalid part.
    pub part: SequenceWarmup,
    /// The number of tokens per sample.
    pub whole: usize,
    /// The expected values, as text for the message.
    pub expected: String,
}

/// Returns the number of tokens per row at a step; `whole` after the warm-up.
pub(crate) fn row_length(warmup: &[SequenceWarmup], step: usize, whole: usize) -> usize {
    let part = warmup.iter().find(|part| step < part.until_step);
    part.map_or(whole, |part| part.length)
}

/// Checks the parts of a warm-up to rows of `whole` tokens, in a run of `steps` steps.
pub(crate) fn check(
    warmup: &[SequenceWarmup],
    steps: usize,
    whole: usize,
) -> Result<(), SequenceWarmupError> {
    let mut before = SequenceWarmup {
        until_step: 0,
        length: 0,
    };
    for part in warmup {
        let SequenceWarmup { until_step, length } = *part;
        let expected = if length == 0 || length >= whole || !whole.is_multiple_of(length) {
            let divisors = (1..whole).filter(|length| whole.is_multiple_of(*length));
            let divisors: Vec<_> = divisors.map(|length| length.to_string()).collect();
            format!("a length of {}", divisors.join(", "))
        } else if length <= before.length {
            format!(
                "a length above {}, the length of the previous part",
                before.length
            )
        } else if until_step <= before.until_step {
            format!("until_step above {}", before.until_step)
        } else if until_step >= steps {
            format!("until_step below {steps}, the steps of the run")
        } else {
            before = *part;
            continue;
        };
        return Err(SequenceWarmupError {
            part: *part,
            whole,
            expected,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(until_step: usize, length: usize) -> SequenceWarmup {
        SequenceWarmup { until_step, length }
    }

    #[test]
    fn each_step_has_the_length_of_its_part() {
        let warmup = [part(2, 8), part(5, 16)];
        check(&warmup, 6, 32).unwrap();
        let lengths: Vec<_> = (0..7).map(|step| row_length(&warmup, step, 32)).collect();
        assert_eq!(lengths, [8, 8, 16, 16, 16, 32, 32]);
        assert_eq!(row_length(&[], 0, 32), 32);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_would() {
        for (warmup, wanted) in [
            (vec![part(2, 12)], "expected a length of 1, 2, 4, 8, 16"),
            (vec![part(2, 32)], "expected a length of 1, 2, 4, 8, 16"),
            (vec![part(2, 8), part(3, 8)], "expected a length above 8"),
            (vec![part(2, 8), part(2, 16)], "expected until_step above 2"),
            (vec![part(0, 8)], "expected until_step above 0"),
            (vec![part(9, 8)], "expected until_step below 9, the steps"),
        ] {
            let error = check(&warmup, 9, 32).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
