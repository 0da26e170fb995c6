//! Updates the scales of FP8 layers from the amax values of a step, and warns about values that exceed the range of the
//! format.

use super::{AddedStatistics, StepContext, StepHook, StepReport};
use crate::TrainError;
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;

/// The name of the hook.
pub(super) const NAME: &str = "fp8_scales";

const COUNTS: &str = "fp8";

/// The hook of a model with FP8 layers.
pub(super) struct Fp8Scales(());

impl Fp8Scales {
    pub fn new<M: LanguageModel>(ddp: &DistributedDataParallel<M>) -> Option<Self> {
        (!ddp.fp8().layers().is_empty()).then_some(Self(()))
    }
}

impl<M: LanguageModel> StepHook<M> for Fp8Scales {
    fn name(&self) -> &str {
        NAME
    }

    /// Runs before the weights change: weights that are gathered in FP8 use the scales of the next step.
    fn statistics(
        &mut self,
        context: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        let counts = context.ddp.fp8().end_step_on_device(context.groups())?;
        if let Some(counts) = counts {
            added.add(COUNTS, counts);
        }
        Ok(())
    }

    fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let (fp8, groups) = (context.ddp.fp8(), context.groups());
        fp8.warn_of_saturation(report.added(COUNTS), groups);
        Ok(())
    }
}
