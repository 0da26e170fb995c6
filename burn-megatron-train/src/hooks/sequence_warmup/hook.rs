//! The hook of the sequence length warm-up.

use super::{NAME, SequenceWarmup};
use crate::TrainConfig;
use crate::hooks::{BatchPlan, StepHook};
use burn_megatron::model::LanguageModel;

/// Sets the rows of the warm-up.
pub struct SequenceWarmupHook(Vec<SequenceWarmup>);

impl SequenceWarmupHook {
    pub fn new(config: &TrainConfig) -> Option<Self> {
        let parts = config.shorter_rows().to_vec();
        (!parts.is_empty()).then_some(Self(parts))
    }
}

impl<M: LanguageModel> StepHook<M> for SequenceWarmupHook {
    fn name(&self) -> &str {
        NAME
    }

    fn batches(&self, plan: &mut BatchPlan) {
        plan.warm_up_rows(self.0.clone());
    }
}
