//! The outcome of a run.

use crate::hooks::cuda_graphs::CudaGraphStats;
use crate::hooks::replay::{ReplayCost, Verdict};
use crate::metrics::HeldOutMetrics;
use burn_megatron_data::Padding;

/// The outcome of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrainOutcome {
    /// The number of steps, including skipped steps and the steps before the checkpoint from which the run was resumed.
    pub steps: usize,
    /// The number of skipped steps. A step is skipped if a loss or a gradient is not finite, if its loss or gradient
    /// norm is a spike, or if it has no targets.
    pub skipped: usize,
    /// The number of steps that were skipped because they had no targets.
    pub without_targets: usize,
    /// The number of steps that were skipped because their loss or gradient norm was a spike.
    pub spikes: usize,
    /// The step, counted from 1, since which no loss has been finite. `None` if the last loss is finite.
    pub diverged: Option<usize>,
    /// [`Verdict::DataOrSoftware`] if an invalid loss was computed again on another rank with the same result,
    /// otherwise `None`. See [`check_replay_every`](crate::TrainConfig::check_replay_every).
    pub bad_loss: Option<Verdict>,
    /// The time of the replay checks on this rank. `None` if
    /// [`check_replay_every`](crate::TrainConfig::check_replay_every) is not set.
    pub replay_cost: Option<ReplayCost>,
    /// The statistics of CUDA graphs on this rank since the start of the run or since it was resumed. `None` without
    /// CUDA graphs.
    pub cuda_graphs: Option<CudaGraphStats>,
    /// The padding of documents since the start of the run or since it was resumed. It is zero unless the run uses the
    /// [per-document split](burn_megatron::mesh::ContextSplit::ZigzagPerDocument) or hybrid context parallelism.
    pub padding: Padding,
    /// Whether the run was stopped before its last step.
    pub stopped: bool,
    /// The held-out loss at the end of the run. `None` if there is no held-out text, or if
    /// [`held_out_samples`](crate::TrainConfig::held_out_samples) is 0.
    pub held_out: Option<HeldOutMetrics>,
}

impl TrainOutcome {
    /// Whether the last training loss or the held-out loss is not finite.
    pub fn has_diverged(&self) -> bool {
        let held_out = self.held_out.as_ref();
        let is_bad = |held_out: &HeldOutMetrics| held_out.tokens > 0 && !held_out.loss.is_finite();
        self.diverged.is_some() || held_out.is_some_and(is_bad)
    }
}
