//! The end of a step: the magnitudes of all ranks give the scales of the next step.

use burn::tensor::Tensor;

use super::buffers::Fp8Snapshot;
use super::config::Fp8Recipe;
use super::{Fp8, Fp8Layer, Operand};
use crate::collective::{to_f64, try_all_gather};
use crate::comm::{CommError, ParallelContext};

impl Fp8 {
    /// Ends a step: adds the largest magnitudes of all its micro-batches to the histories and computes
    /// the scales of the next step. Call it when all gradients are computed and before weights change,
    /// also in a skipped step. Collective: call on all ranks of the stage.
    ///
    /// Magnitudes are gathered over the tensor and the data axis, in one call for all layers. So all ranks
    /// have the same scales, independent of the number of ranks and of micro-batches.
    ///
    /// Warns of each tensor of which more values than
    /// [`saturation_limit`](super::Fp8Config::saturation_limit) were beyond the format; once, until it is
    /// below the limit again. For that it waits for the device.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the communication fails.
    pub fn end_step(&self, groups: &ParallelContext) -> Result<(), CommError> {
        if let Some(counts) = self.end_step_on_device(groups)? {
            self.warn_of_saturation(&to_f64(counts), groups);
        }
        Ok(())
    }

    /// [`end_step`](Self::end_step) for a program without a mesh, on one rank.
    ///
    /// # Errors
    ///
    /// None on a single rank.
    pub fn end_step_single_rank(&self) -> Result<(), CommError> {
        self.end_step(&ParallelContext::single())
    }

    /// [`end_step`](Self::end_step) without waiting for the device. Returns the numbers for
    /// [`warn_of_saturation`](Self::warn_of_saturation), in f32, if there are layers.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the communication fails.
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

    /// Returns the state that the layers change in a step, to run it again with [`restore`](Self::restore).
    pub fn snapshot(&self) -> Fp8Snapshot {
        self.shared.model.buffers.snapshot()
    }

    /// Restores a snapshot. Weights are quantised again.
    pub fn restore(&self, snapshot: &Fp8Snapshot) {
        self.shared.model.buffers.restore_snapshot(snapshot);
        self.invalidate_weights();
    }

    /// Warns of the tensors of a step with more values beyond the format than the limit.
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
    /// New scales change the weight in 8 bits.
    fn begin_step(&self) {
        for operand in self.state().iter_mut() {
            operand.is_measured = false;
        }
        if let Fp8Recipe::Delayed(_) = self.shared.recipe {
            self.drop_cached_weight();
        }
    }

    /// Warns of operands with more values beyond the format than the limit. `counts` has for each of them
    /// the number of such values, and that of all.
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
