//! The hook of the batch size warm-up.

use super::{BatchWarmup, NAME};
use crate::TrainConfig;
use crate::hooks::{BatchPlan, StepHook};
use burn_megatron::model::LanguageModel;

/// Sets the batches of the warm-up.
pub struct BatchWarmupHook(Vec<BatchWarmup>);

impl BatchWarmupHook {
    pub fn new(config: &TrainConfig) -> Option<Self> {
        let parts = config.smaller_batches().to_vec();
        (!parts.is_empty()).then_some(Self(parts))
    }
}

impl<M: LanguageModel> StepHook<M> for BatchWarmupHook {
    fn name(&self) -> &str {
        NAME
    }

    fn batches(&self, plan: &mut BatchPlan) {
        plan.warm_up_batches(self.0.clone());
    }
}
