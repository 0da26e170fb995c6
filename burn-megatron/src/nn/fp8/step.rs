//! The end of a step: what all ranks have seen becomes the scales of the next.

use super::noted::{Noted, Seen};
use super::{Fp8, Fp8Layer, Operand};
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, Groups, ReduceOp};

/// What says that a rank has seen no tensor.
const NOTHING: i32 = -1;

impl Fp8 {
    /// Ends a step: the largest magnitudes of all its micro-batches go into the histories, and the
    /// scales of the next step follow. To be called when all gradients are there and before weights
    /// change; of a step that is skipped too. Every rank of the stage must come.
    ///
    /// Magnitudes are reduced over the tensor and the data axis, in one call for all layers. So all ranks
    /// have the same scales, and these depend neither on the number of ranks nor on that of micro-batches.
    ///
    /// Warns of each tensor of which more values were beyond the format than
    /// [`saturation_limit`](super::Fp8Config::saturation_limit) says; once, until it is below again.
    ///
    /// # Errors
    ///
    /// [`CommError`] when a rank is missing.
    pub fn end_step(&self, groups: &Groups) -> Result<(), CommError> {
        let _span = tracing::debug_span!("end_fp8_step").entered();
        let layers = self.layers();
        if layers.is_empty() {
            return Ok(());
        }
        let noted = layers.iter().flat_map(Fp8Layer::take_noted).collect();
        let mut seen = Noted::read(noted);
        agree(&mut seen, groups.stage())?;
        let limit = self.config().saturation_limit;
        let warns = groups.stage().rank() == 0;
        for (layer, seen) in layers.iter().zip(seen.chunks(Operand::ALL.len())) {
            layer.roll(seen);
            layer.watch(seen, limit, warns);
        }
        Ok(())
    }

    /// [`end_step`](Self::end_step) of a program without a mesh, with one rank.
    ///
    /// # Errors
    ///
    /// None that a single rank can meet.
    pub fn end_step_alone(&self) -> Result<(), CommError> {
        self.end_step(&Groups::single())
    }
}

/// The largest magnitudes and the sums of the counts of all ranks.
fn agree(seen: &mut [Seen], comm: &Comm) -> Result<(), CommError> {
    if comm.size() == 1 {
        return Ok(());
    }
    // As bits, of which none is rounded, and those of a NaN are above all.
    let bits = |seen: &Seen| seen.amax.map_or(NOTHING, |amax| amax.to_bits() as i32);
    let bits: Vec<i32> = seen.iter().map(bits).collect();
    let counts = seen
        .iter()
        .flat_map(|seen| [seen.beyond as i64, seen.elements as i64]);
    let counts: Vec<i64> = counts.collect();
    let bits = match comm.all_reduce(Buffer::from(bits), ReduceOp::Max)? {
        Buffer::I32(bits) => bits,
        other => unreachable!("i32 went in, {} came out", other.dtype()),
    };
    let counts = match comm.all_reduce(Buffer::from(counts), ReduceOp::Sum)? {
        Buffer::I64(counts) => counts,
        other => unreachable!("i64 went in, {} came out", other.dtype()),
    };
    for ((seen, bits), counts) in seen.iter_mut().zip(bits).zip(counts.chunks(2)) {
        *seen = Seen {
            amax: (bits != NOTHING).then(|| f32::from_bits(bits as u32)),
            beyond: counts[0] as u64,
            elements: counts[1] as u64,
        };
    }
    Ok(())
}

impl Fp8Layer {
    /// What was noted of each operand since the last call.
    fn take_noted(&self) -> [Noted; 3] {
        self.state()
            .each_mut()
            .map(|operand| std::mem::take(&mut operand.noted))
    }

    /// The histories go on, where there was something to see.
    fn roll(&self, seen: &[Seen]) {
        let mut operands = self.state();
        let mut is_new = false;
        for (operand, seen) in operands.iter_mut().zip(seen) {
            operand.is_measured = false;
            if let (Some(history), Some(amax)) = (&mut operand.history, seen.amax) {
                history.roll(amax);
                operand.rescaled();
                is_new = true;
            }
        }
        drop(operands);
        if is_new {
            self.forget_weight();
        }
    }

    /// Warns of operands that are beyond the format too often.
    fn watch(&self, seen: &[Seen], limit: f64, warns: bool) {
        for (operand, seen) in Operand::ALL.into_iter().zip(seen) {
            if seen.elements == 0 {
                continue;
            }
            let share = seen.beyond as f64 / seen.elements as f64;
            let was =
                std::mem::replace(&mut self.state()[operand as usize].is_warned, share > limit);
            if share > limit && !was && warns {
                tracing::warn!(
                    path = self.path(),
                    %operand,
                    "{:.2} % of the {operand} of {} are beyond the largest value of the format, with a \
                     limit of {:.2} %",
                    100.0 * share,
                    self.path(),
                    100.0 * limit,
                );
            }
        }
    }
}
