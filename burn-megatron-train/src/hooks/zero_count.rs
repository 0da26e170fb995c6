//! Counts the gradient elements that are zero.

use std::collections::VecDeque;

use super::{StepContext, StepHook, StepReport, StepUpdate};
use crate::{TrainConfig, TrainError};
use burn_megatron::data_parallel::Gradients;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::count_zeros;

/// The name of the hook.
pub(super) const NAME: &str = "zero_count";

/// The hook of [`count_zeros`](TrainConfig::count_zeros).
pub(super) struct ZeroCount {
    /// The counts of the steps that are launched but not reported yet.
    counts: VecDeque<u64>,
}

impl ZeroCount {
    pub fn new(config: &TrainConfig) -> Option<Self> {
        let counts = VecDeque::new();
        config.count_zeros.then_some(Self { counts })
    }
}

impl<M: LanguageModel> StepHook<M> for ZeroCount {
    fn name(&self) -> &str {
        NAME
    }

    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        _: &StepUpdate<'_>,
        gradients: &Gradients,
    ) -> Result<(), TrainError> {
        self.counts.push_back(count_zeros(gradients, context.ddp)?);
        Ok(())
    }

    fn metrics(
        &mut self,
        _: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        report.metrics.zeros = self.counts.pop_front();
        Ok(())
    }
}
