//! The end of a step: the magnitudes of all ranks give the scales of the next step.

use super::amax_log::{AmaxLog, AmaxStatistics};
use super::{Fp8, Fp8Layer, Operand};
use crate::collective::Comm;
use crate::comm::{CommError, ParallelContext, ReduceOp};

/// Sent by a rank that had no tensor.
const NO_AMAX: i32 = -1;

impl Fp8 {
    /// Ends a step: adds the largest magnitudes of all its micro-batches to the histories and computes
    /// the scales of the next step. Call it when all gradients are computed and before weights change,
    /// also in a skipped step. Collective: call on all ranks of the stage.
    ///
    /// Magnitudes are reduced over the tensor and the data axis, in one call for all layers. So all ranks
    /// have the same scales, independent of the number of ranks and of micro-batches.
    ///
    /// Warns of each tensor of which more values than
    /// [`saturation_limit`](super::Fp8Config::saturation_limit) were beyond the format; once, until it is
    /// below the limit again.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the communication fails.
    pub fn end_step(&self, groups: &ParallelContext) -> Result<(), CommError> {
        let _span = tracing::debug_span!("end_fp8_step").entered();
        let layers = self.layers();
        if layers.is_empty() {
            return Ok(());
        }
        let logs = layers.iter().flat_map(Fp8Layer::take_amax_logs).collect();
        let mut statistics = AmaxLog::read(logs);
        all_reduce(&mut statistics, groups.stage())?;
        let limit = self.config().saturation_limit;
        let warns = groups.stage().rank() == 0;
        for (layer, statistics) in layers.iter().zip(statistics.chunks(Operand::ALL.len())) {
            layer.roll(statistics);
            layer.warn_if_saturated(statistics, limit, warns);
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
}

/// Reduces the largest magnitudes and the counts over all ranks.
fn all_reduce(statistics: &mut [AmaxStatistics], comm: &Comm) -> Result<(), CommError> {
    if comm.size() == 1 {
        return Ok(());
    }
    // As bits: nothing is rounded, and a NaN is the largest.
    let bits = |statistics: &AmaxStatistics| {
        statistics
            .amax
            .map_or(NO_AMAX, |amax| amax.to_bits() as i32)
    };
    let local_bits: Vec<i32> = statistics.iter().map(bits).collect();
    let counts = statistics
        .iter()
        .flat_map(|statistics| [statistics.beyond as i64, statistics.elements as i64]);
    let local_counts: Vec<i64> = counts.collect();
    let bits: Vec<i32> = comm
        .all_reduce(local_bits.into(), ReduceOp::Max)?
        .into_vec();
    let counts: Vec<i64> = comm
        .all_reduce(local_counts.into(), ReduceOp::Sum)?
        .into_vec();
    for ((statistics, bits), counts) in statistics.iter_mut().zip(bits).zip(counts.chunks(2)) {
        *statistics = AmaxStatistics {
            amax: (bits != NO_AMAX).then(|| f32::from_bits(bits as u32)),
            beyond: counts[0] as u64,
            elements: counts[1] as u64,
        };
    }
    Ok(())
}

impl Fp8Layer {
    /// Takes the logs of each operand since the last call.
    fn take_amax_logs(&self) -> [AmaxLog; 3] {
        self.state()
            .each_mut()
            .map(|operand| std::mem::take(&mut operand.amax_log))
    }

    /// Adds the magnitudes to the histories, where there are any.
    fn roll(&self, statistics: &[AmaxStatistics]) {
        let mut operands = self.state();
        let mut is_changed = false;
        for (operand, statistics) in operands.iter_mut().zip(statistics) {
            operand.is_measured = false;
            if let (Some(history), Some(amax)) = (&mut operand.history, statistics.amax) {
                history.roll(amax);
                operand.drop_scale();
                is_changed = true;
            }
        }
        drop(operands);
        if is_changed {
            self.drop_cached_weight();
        }
    }

    /// Warns of operands with more values beyond the format than the limit.
    fn warn_if_saturated(&self, statistics: &[AmaxStatistics], limit: f64, warns: bool) {
        for (operand, statistics) in Operand::ALL.into_iter().zip(statistics) {
            if statistics.elements == 0 {
                continue;
            }
            let fraction = statistics.beyond as f64 / statistics.elements as f64;
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
