//! The end of a training step, when the magnitudes of all ranks determine the scales of the next step.

use burn::tensor::Tensor;

use super::buffers::Fp8Snapshot;
use super::config::Fp8Recipe;
use super::{Fp8, Fp8Layer, Operand};
use crate::collective::{to_f64, try_all_gather};
use crate::comm::{CommError, ParallelContext};

impl Fp8 {
    /// Ends a training step: adds the largest magnitudes of all micro-batches of the step to the histories, and
    /// computes the scales of the next step. Call this method after all gradients are computed and before the weights
    /// change, even if the optimizer step is skipped. This call is collective: make it on all ranks of the stage.
    ///
    /// One all-gather over the tensor and data axes collects the magnitudes of all layers. All ranks therefore have the
    /// same scales. The scales do not depend on the number of ranks or micro-batches.
    ///
    /// Logs a warning for each tensor whose fraction of saturated values exceeds
    /// [`saturation_limit`](super::Fp8Config::saturation_limit). The warning is not repeated until the fraction has
    /// been below the limit again. This check synchronizes with the device.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the collective fails.
    pub fn end_step(&self, groups: &ParallelContext) -> Result<(), CommError> {
        if let Some(counts) = self.end_step_on_device(groups)? {
            self.warn_of_saturation(&to_f64(counts), groups);
        }
        Ok(())
    }

    /// Does the same as [`end_step`](Self::end_step), for a program on one rank without a device mesh.
    ///
    /// # Errors
    ///
    /// On a single rank no error occurs.
    pub fn end_step_single_rank(&self) -> Result<(), CommError> {
        self.end_step(&ParallelContext::single())
    }

    /// Does the same as [`end_step`](Self::end_step), but does not synchronize with the device and logs no warnings.
    /// Returns an f32 tensor of counts to pass to [`warn_of_saturation`](Self::warn_of_saturation), or `None` if there
    /// are no FP8 layers.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the collective fails.
    pub fn end_step_on_device(
        &self,
        groups: &ParallelContext,
    ) -> Result<Option<Tensor<1>>, CommError> {
        let _span = tracing::debug_span!("end_fp8_step").entered();
        let gather = |log| try_all_gather(log, groups.stage());
        let counts = self.shared.model.buffers.end_step(gather)?;
        for layer in self.layers() {
            layer.begin_step();
        }
        Ok(counts)
    }

    /// Returns a copy of the FP8 state that a step changes. Pass the copy to [`restore`](Self::restore) to repeat the
    /// step.
    pub fn snapshot(&self) -> Fp8Snapshot {
        self.shared.model.buffers.snapshot()
    }

    /// Restores the FP8 state from a snapshot. The weights are quantized again at their next use.
    pub fn restore(&self, snapshot: &Fp8Snapshot) {
        self.shared.model.buffers.restore_snapshot(snapshot);
        self.invalidate_weights();
    }

    /// Logs a warning for each tensor whose fraction of saturated values in the last step exceeds the limit. `counts`
    /// are the values that [`end_step_on_device`](Self::end_step_on_device) returned.
    pub fn warn_of_saturation(&self, counts: &[f64], groups: &ParallelContext) {
        let limit = self.config().saturation_limit;
        let warns = groups.stage().rank() == 0;
        for layer in self.layers() {
            let counts = &counts[2 * layer.shared.first_slot..];
            layer.warn_if_saturated(counts, limit, warns);
        }
    }
}

impl Fp8Layer {
    /// Begins a step. The new scales invalidate the cached FP8 weight.
    fn begin_step(&self) {
        for operand in self.state().iter_mut() {
            operand.is_measured = false;
        }
        if let Fp8Recipe::Delayed(_) = self.shared.recipe {
            self.drop_cached_weight();
        }
    }

    /// Warns about operands whose fraction of saturated values exceeds the limit. `counts` has the number of
    /// saturated values and the number of all values of each operand.
    fn warn_if_saturated(&self, counts: &[f64], limit: f64, warns: bool) {
        for (operand, counts) in Operand::ALL.into_iter().zip(counts.chunks(2)) {
            let (beyond, elements) = (counts[0], counts[1]);
            if elements == 0.0 {
                continue;
            }
            let fraction = beyond / elements;
            let was_warned = std::mem::replace(
                &mut self.state()[operand as usize].is_warned,
                fraction > limit,
            );
            if fraction > limit && !was_warned && warns {
                tracing::warn!(
                    path = self.path(),
                    %operand,
                    "{:.2} % of the {operand} of {} are beyond the largest value of the format, with a \
                     limit of {:.2} %",
                    100.0 * fraction,
                    self.path(),
                    100.0 * limit,
                );
            }
        }
    }
}
