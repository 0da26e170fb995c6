//! Measures the largest attention logits of a step, and limits them with QK-Clip.

use burn::tensor::Tensor;

use super::{
    AddedStatistics, RemainingHooks, StepContext, StepHook, StepInput, StepReport, StepRun,
    StepUpdate,
};
use crate::{TrainConfig, TrainError};
use burn_megatron::data_parallel::{DistributedDataParallel, Gradients};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::AttentionLayer;
use burn_megatron::optim::{OptimizerError, QkClip};

/// The name of the hook.
pub(super) const NAME: &str = "qk_clip";

/// The name of the logits in the statistics of a step.
const LOGITS: &str = "attention_logits";

/// The hook of [`qk_clip`](TrainConfig::qk_clip) and [`log_max_attention_logit`](TrainConfig::log_max_attention_logit).
pub(super) struct AttentionLogitLimit {
    /// The attention layers of all stages.
    layers: Vec<AttentionLayer>,
    clip: Option<QkClip>,
    /// The largest logits of the last run.
    logits: Option<Tensor<1>>,
}

impl AttentionLogitLimit {
    /// Returns `None` if no logits are measured. Collective: call on all ranks of the pipeline.
    pub fn new<M: LanguageModel>(
        config: &TrainConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Option<Self>, TrainError> {
        let Some(setting) = config.measures_logits() else {
            return Ok(None);
        };
        let layers = AttentionLayer::of_all_stages(ddp.attention_logits(), ddp.groups())?;
        if layers.is_empty() {
            return Err(OptimizerError::NoAttention { setting }.into());
        }
        let clip = config.qk_clip.as_ref();
        let clip = clip.map(|clip| QkClip::new(clip, &layers, ddp));
        Ok(Some(Self {
            clip: clip.transpose()?,
            layers,
            logits: None,
        }))
    }
}

impl<M: LanguageModel> StepHook<M> for AttentionLogitLimit {
    fn name(&self) -> &str {
        NAME
    }

    fn wrap_run(
        &mut self,
        context: &mut StepContext<'_, M>,
        input: &StepInput<'_>,
        mut next: RemainingHooks<'_, M>,
    ) -> Result<StepRun, TrainError> {
        context.ddp.attention_logits().begin_step();
        let run = next.run(context, input)?;
        let (logits, world) = (context.ddp.attention_logits(), context.groups().world());
        self.logits = Some(logits.end_step(&self.layers, context.device, world));
        Ok(run)
    }

    fn statistics(
        &mut self,
        _: &mut StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) -> Result<(), TrainError> {
        if let Some(logits) = self.logits.take() {
            added.add(LOGITS, logits);
        }
        Ok(())
    }

    fn before_update(
        &mut self,
        context: &mut StepContext<'_, M>,
        update: &StepUpdate<'_>,
        _: &Gradients,
    ) -> Result<(), TrainError> {
        if update.launches
            && let (Some(clip), Some(logits)) = (&self.clip, update.added(LOGITS))
        {
            let taken = context.defers.then(|| update.taken());
            let change = clip.change(logits, taken.as_ref());
            context.ddp.after_next_step(change);
        }
        Ok(())
    }

    fn metrics(
        &mut self,
        _: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let logits = report.added(LOGITS).iter().copied();
        report.metrics.max_attention_logit = logits.reduce(f64::max);
        Ok(())
    }
}
