//! Tells what a bad loss is due to: it is computed again here, and then on another rank of the data axis.

use burn::tensor::Tensor;

use super::super::{LanguageModel, TrainError, Trainer, Verdict};
use super::{ReplayError, StepInput};
use crate::collective::to_f64;
use crate::data::{Batch, Samples};
use crate::data_parallel::Gradients;
use crate::fingerprint::of_tensor;
use crate::nn::fp8::Fp8Snapshot;
use crate::optim::all_finite;

/// What is known of a step with a bad loss.
pub(in crate::train) struct BadLoss<'a> {
    pub input: &'a StepInput<'a>,
    pub losses: &'a [Tensor<1>],
    pub gradients: &'a Gradients,
    /// The 8-bit layers before the step.
    pub fp8: &'a Fp8Snapshot,
    /// What is bad, for the report: `the loss is not finite`.
    pub what: &'static str,
}

impl BadLoss<'_> {
    fn error(&self, verdict: Verdict, message: &str) -> TrainError {
        let message = format!("{}: {message}", self.what);
        let step = self.input.step + 1;
        ReplayError {
            step,
            verdict,
            message,
        }
        .into()
    }
}

impl<M: LanguageModel> Trainer<M> {
    /// Computes a step with a bad loss again, on this rank, and its batches on the next rank of the data axis. Collective:
    /// call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks, if another result was computed here or there.
    pub(in crate::train) fn examine(
        &mut self,
        bad: &BadLoss<'_>,
        samples: &dyn Samples,
    ) -> Result<(), TrainError> {
        let after = self.ddp.fp8().snapshot();
        self.compute_again(bad)?;
        let groups = self.ddp.groups();
        let reason = if groups.data().size() == 1 {
            Some("the layout has one data-parallel rank")
        } else if groups.config().splits_experts() {
            Some("the experts compute samples of several data-parallel ranks")
        } else {
            None
        };
        if reason.is_none() {
            self.compute_elsewhere(bad, samples)?;
            self.replay.is_bad_elsewhere = true;
        }
        self.ddp.fp8().restore(&after);
        if self.ddp.groups().rank() == 0 {
            let (step, what) = (bad.input.step + 1, bad.what);
            match reason {
                Some(reason) => tracing::warn!(
                    step,
                    "{what}: the same when computed again; it was not computed on another device, as {reason}"
                ),
                None => tracing::warn!(
                    step,
                    "{what}: the same when computed again, and on another data-parallel rank: it is due to the data, the \
                     settings or the software"
                ),
            }
        }
        Ok(())
    }

    /// Fails if a second run on the same ranks has other losses or gradients.
    fn compute_again(&mut self, bad: &BadLoss<'_>) -> Result<(), TrainError> {
        let (losses, sums, _) = self.run_from(bad.fp8, bad.input)?;
        let others = match self.ranks_where(losses != losses_of(bad.losses))? {
            Some(ranks) => Some(("losses", ranks)),
            None => {
                let ranks = self.ranks_where(sums != sums_of(bad.gradients))?;
                ranks.map(|ranks| ("gradients", ranks))
            }
        };
        let Some((others, ranks)) = others else {
            return Ok(());
        };
        let message = format!("computed again from one state, the {others} are others on {ranks}");
        Err(bad.error(Verdict::Transient, &message))
    }

    /// Fails if the samples of each rank have other losses or good gradients on the next data-parallel rank.
    fn compute_elsewhere(
        &mut self,
        bad: &BadLoss<'_>,
        samples: &dyn Samples,
    ) -> Result<(), TrainError> {
        let data = self.ddp.groups().data().clone();
        let (rank, ranks) = (data.rank(), data.size());
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let batches = self.batches_of(bad.input.step, next, samples)?;
        let input = StepInput {
            batches: &batches,
            data_rank: next,
            ..bad.input.clone()
        };
        let (of_next, _, is_finite_there) = self.run_from(bad.fp8, &input)?;
        // Each rank has computed those of the next one.
        let all: Vec<i64> = data.all_gather(vec![of_next as i64].into())?.into_vec();
        let is_other = all[before] as u64 != losses_of(bad.losses);
        if let Some(found) = self.ranks_where(is_other)? {
            let message = format!(
                "on the next data-parallel rank the losses of the same samples are others than those of {found}, which a \
                 second run repeats"
            );
            return Err(bad.error(Verdict::Device, &message));
        }
        let groups = self.ddp.groups();
        let was_finite = all_finite(is_finite(bad.gradients), groups)?;
        if all_finite(is_finite_there, groups)? && !was_finite {
            let message = "with the samples of each rank on the next data-parallel rank all gradients are finite";
            return Err(bad.error(Verdict::Device, message));
        }
        Ok(())
    }

    /// Runs a step from this state of the 8-bit layers: the fingerprints of the losses and of the gradients of this rank,
    /// and whether the latter are finite.
    fn run_from(
        &mut self,
        fp8: &Fp8Snapshot,
        input: &StepInput<'_>,
    ) -> Result<(u64, u64, bool), TrainError> {
        self.ddp.fp8().restore(fp8);
        let (run, _) = self.observed_run(input, false)?;
        let finite = is_finite(&run.gradients);
        Ok((
            losses_of(&run.losses.losses),
            sums_of(&run.gradients),
            finite,
        ))
    }

    /// The ranks on which `is_wrong`, as text; `None` if there are none. Collective: call on all ranks of the world.
    fn ranks_where(&self, is_wrong: bool) -> Result<Option<String>, TrainError> {
        let all: Vec<bool> = self.gather(&is_wrong)?;
        let ranks = all.iter().enumerate().filter(|(_, is_wrong)| **is_wrong);
        let ranks: Vec<_> = ranks.map(|(rank, _)| rank.to_string()).collect();
        Ok(match &ranks[..] {
            [] => None,
            [rank] => Some(format!("rank {rank}")),
            ranks => Some(format!("ranks {}", ranks.join(", "))),
        })
    }

    /// The micro-batches of a rank of the data axis in the step that runs.
    fn batches_of(
        &self,
        step: usize,
        data_rank: usize,
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, TrainError> {
        let before = self.samples - self.sizes().of(step) as u64;
        Ok(self.batches_from((step, before), data_rank, samples)?)
    }
}

fn losses_of(losses: &[Tensor<1>]) -> u64 {
    let sums = losses.iter().map(|loss| of_tensor(loss.clone()));
    sums.fold(0, |all: u64, sum| all.rotate_left(7) ^ sum)
}

fn sums_of(gradients: &Gradients) -> u64 {
    let sums = gradients.sums().map(|sum| of_tensor(sum.clone()));
    sums.fold(0, |all: u64, sum| all.rotate_left(7) ^ sum)
}

fn is_finite(gradients: &Gradients) -> bool {
    let mut sums = gradients.sums().map(|sum| to_f64(sum.clone()));
    sums.all(|values| values.iter().all(|value| value.is_finite()))
}
