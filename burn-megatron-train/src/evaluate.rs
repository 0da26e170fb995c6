//! Evaluates the loss on held-out text.

use std::slice;

use super::losses::LossSums;
use super::metrics::HeldOutMetrics;
use super::micro_batches::{ContextPart, targets};
use super::{TrainError, Trainer};
use burn_megatron::collective::Comm;
use burn_megatron::comm::{CommError, ReduceOp};
use burn_megatron::data_parallel::ZeroStage;
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::LossFactor;
use burn_megatron_data::{Batch, Dataset};

impl<M: LanguageModel> Trainer<M> {
    /// Computes the mean loss on held-out text with the current weights, in the same way as
    /// [`evaluate`](Self::evaluate). If [`ema.evaluate`](burn_megatron::optim::EmaConfig::evaluate) is set, the
    /// averaged weights are used instead. The metrics contain the current number of steps. Collective: call on all
    /// ranks of the world.
    ///
    /// # Errors
    ///
    /// The errors of [`fit`](Self::fit).
    pub fn evaluate_average(&mut self, data: &dyn Dataset) -> Result<HeldOutMetrics, TrainError> {
        let (hooks, mut context) = self.split(self.steps());
        hooks.before_evaluation(&mut context);
        let held_out = self.evaluate(data, self.steps());
        let (hooks, mut context) = self.split(self.steps());
        hooks.after_evaluation(&mut context);
        held_out
    }

    /// Computes the mean loss on held-out text. `steps` is the number of updates so far, which is stored in the
    /// metrics. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// The errors of [`fit`](Self::fit).
    pub fn evaluate(&self, data: &dyn Dataset, steps: usize) -> Result<HeldOutMetrics, TrainError> {
        let _span = tracing::info_span!("evaluate", steps).entered();
        let windows = data.held_out(self.sequence_length(), self.config.held_out_samples)?;
        let (axis, size) = (self.ddp.groups().data(), self.config.micro_batch_size);
        let own = windows.iter().skip(axis.rank()).step_by(axis.size());
        let own: Vec<_> = own.cloned().collect();
        let mut batches: Vec<_> = own.chunks(size).map(|own| (own, true)).collect();
        let sharded = self.ddp.config().zero_stage == ZeroStage::Parameters;
        if let Some(first) = windows.first()
            && (sharded || self.ddp.groups().config().splits_experts())
        {
            // Every rank must call the same number of collectives: a rank with fewer windows repeats a window.
            let rounds = windows.len().div_ceil(axis.size()).div_ceil(size);
            batches.resize(rounds, (slice::from_ref(first), false));
        }
        let terms = self.ddp.module().loss_terms();
        let depths = self.ddp.module().further_depths();
        let context = ContextPart::of(self.ddp.groups(), depths);
        let (mut losses, mut tokens) = (LossSums::new(terms), 0.0);
        for (windows, counts) in batches {
            let batch = context.of_batch(Batch::new(windows.iter().cloned())?)?;
            let weight = if counts { 1.0 } else { 0.0 };
            tokens += weight * batch.counted() as f64;
            let Some(hidden) = self.runner.hidden(&batch, &self.ddp, &self.device)? else {
                continue;
            };
            let targets = targets(&batch, &self.device);
            let module = self.ddp.module();
            let sums = module.loss_sums_of(hidden, targets, &LossFactor::Number(1.0));
            losses.add_losses(sums, weight);
        }
        let tokens = self.sum_over_data(vec![tokens])?[0];
        // The losses are zero on all but one rank of each pipeline.
        let sums = self.sum(losses.0, self.ddp.groups().pipeline())?;
        let mean = LossSums(self.sum_over_data(sums)?).over(tokens, terms);
        Ok(HeldOutMetrics {
            step: steps,
            loss: mean.loss,
            bits_per_byte: mean.bits_per_byte(data.bytes_per_token()),
            minimised: mean.minimised,
            tokens: tokens as u64,
        })
    }

    /// Sums values over the ranks that have different tokens.
    pub(super) fn sum_over_data(&self, values: Vec<f64>) -> Result<Vec<f64>, CommError> {
        let groups = self.ddp.groups();
        self.sum(self.sum(values, groups.context())?, groups.data())
    }

    pub(super) fn sum(&self, values: Vec<f64>, comm: &Comm) -> Result<Vec<f64>, CommError> {
        Ok(comm.all_reduce(values.into(), ReduceOp::Sum)?.into_vec())
    }
}
