//! Updates the router biases of experts from their load, for load balancing without an auxiliary loss
//! (arXiv:2408.15664).

use super::expert_load::{REPORTS, Routers};
use super::{AddedStatistics, StepContext, StepHook, StepUpdate};
use crate::TrainError;
use burn_megatron::data_parallel::Gradients;
use burn_megatron::model::LanguageModel;

/// The name of the hook.
pub(super) const NAME: &str = "router_bias";

/// The hook of a model with experts. All ranks have it, because pipeline stages without biases also take part in the
/// collective.
pub(super) struct RouterBias(pub Routers);

impl<M: LanguageModel> StepHook<M> for RouterBias {
    fn name(&self) -> &str {
        NAME
    }

    fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        self.0.add_reports(context, added);
        Ok(())
    }

    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        _: &Gradients,
    ) -> Result<(), TrainError> {
        if let Some(reports) = update.added(REPORTS) {
            let routers = context.ddp.routers();
            routers.update_biases(&self.0.0, reports, &update.taken());
        }
        Ok(())
    }
}
