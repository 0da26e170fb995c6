//! The metadata of a checkpoint, and the retention policy of a folder of checkpoints.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The metadata of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointMetadata {
    /// The number of completed steps.
    pub step: u64,
    /// The number of consumed samples.
    pub samples: u64,
    /// The parallel layout of the run that saved the checkpoint, for display. Any layout can load the checkpoint.
    pub layout: String,
    /// The recipe of the run.
    pub config: Value,
    /// The rest of the state that a run needs to resume.
    pub state: Value,
}

/// The retention policy, which selects the older checkpoints that are kept after a save. The newest checkpoint is
/// always kept.
///
/// ```
/// use burn_megatron::checkpoint::Retention;
///
/// // Keep the newest checkpoint, and every 20th step.
/// let keep = Retention { last: Some(1), every: Some(20) };
/// assert_eq!(keep.removes(&[10, 20, 30, 40, 50]), [10, 30]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// The number of most recent checkpoints that are kept. `None` keeps all checkpoints.
    pub last: Option<usize>,
    /// If set, checkpoints whose step is a multiple of this number are also kept.
    pub every: Option<u64>,
}

impl Retention {
    /// Returns the steps whose checkpoints are removed. `steps` are the steps of all checkpoints, in any order.
    pub fn removes(&self, steps: &[u64]) -> Vec<u64> {
        let mut steps = steps.to_vec();
        steps.sort_unstable();
        let Some(last) = self.last else { return vec![] };
        steps.truncate(steps.len().saturating_sub(last.max(1)));
        let kept = |step: u64| self.every.is_some_and(|every| step.is_multiple_of(every));
        steps.retain(|step| !kept(*step));
        steps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u64; 0] = [];

    #[test]
    fn the_last_and_each_kth_stay() {
        let removes = |last, every| Retention { last, every }.removes(&[40, 10, 30, 20, 50]);
        assert_eq!(removes(None, None), NONE);
        assert_eq!(removes(None, Some(20)), NONE);
        assert_eq!(removes(Some(2), None), [10, 20, 30]);
        assert_eq!(removes(Some(2), Some(20)), [10, 30]);
        assert_eq!(removes(Some(0), None), [10, 20, 30, 40]);
        assert_eq!(removes(Some(9), None), NONE);
        assert_eq!(removes(Some(1), Some(0)), [10, 20, 30, 40]);
    }
}
