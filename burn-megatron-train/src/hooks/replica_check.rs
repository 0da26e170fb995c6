//! Checks that replicas of the weights have the same bits.

use super::{StepContext, StepHook, StepUpdate};
use crate::{TrainConfig, TrainError};
use burn_megatron::model::LanguageModel;

/// The name of the hook.
pub(super) const NAME: &str = "replica_check";

/// The hook of [`check_replicas_every`](TrainConfig::check_replicas_every).
pub(super) struct ReplicaCheck {
    every: usize,
}

impl ReplicaCheck {
    pub fn new(config: &TrainConfig) -> Option<Self> {
        let every = config.check_replicas_every?;
        Some(Self { every })
    }
}

impl<M: LanguageModel> StepHook<M> for ReplicaCheck {
    fn name(&self) -> &str {
        NAME
    }

    fn after_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        _: &StepUpdate<'_>,
    ) -> Result<(), TrainError> {
        if context.step().is_multiple_of(self.every) {
            context.ddp.check_replicas()?;
        }
        Ok(())
    }
}
