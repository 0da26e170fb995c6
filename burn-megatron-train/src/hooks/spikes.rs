//! Skips steps whose loss or gradient norm is a spike.

use super::{RemainingHooks, StepContext, StepDecision, StepHook};
use crate::metrics::SkipReason;
use crate::{TrainConfig, TrainError};
use burn_megatron::checkpoint::state::RunState;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{SpikeConfig, SpikeWindow, all_finite};

/// The name of the hook.
pub(super) const NAME: &str = "spikes";

/// The hook of [`skip_spikes`](TrainConfig::skip_spikes).
pub(super) struct SkipSpikes {
    config: SpikeConfig,
    window: SpikeWindow,
}

impl SkipSpikes {
    pub fn new(config: &TrainConfig) -> Option<Self> {
        Some(Self {
            config: config.skip_spikes?,
            window: SpikeWindow::default(),
        })
    }
}

impl<M: LanguageModel> StepHook<M> for SkipSpikes {
    fn name(&self) -> &str {
        NAME
    }

    /// Skips a step if it is a spike on any rank. The values of the step are added to the window in either case.
    fn decide(
        &mut self,
        context: &mut StepContext<'_, M>,
        decision: &mut StepDecision<'_>,
        _: RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        if !decision.is_valid(context) {
            return Ok(());
        }
        let (loss, norm) = (decision.loss(context), decision.gradient_norm(context));
        let own = self.window.is_spike(&self.config, loss, norm);
        self.window.push(&self.config, loss, norm);
        // Ranks that compute the same loss may round it differently.
        if !all_finite(!own, context.groups())? {
            decision.skip(SkipReason::Spike);
        }
        Ok(())
    }

    fn save_state(&self, state: &mut RunState) {
        state.spikes = Some(self.window.clone());
    }

    fn load_state(
        &mut self,
        _: &mut StepContext<'_, M>,
        state: Option<&RunState>,
    ) -> Result<(), TrainError> {
        if let Some(state) = state {
            self.window = state.spikes.clone().unwrap_or_default();
        }
        Ok(())
    }

    fn deferral_error(&self) -> Option<TrainError> {
        Some(TrainError::Deferred {
            setting: "skip_spikes",
        })
    }
}
