//! Reports the load of the experts of a step.

use super::{AddedStatistics, StepContext, StepHook, StepReport};
use crate::TrainError;
use crate::expert_metrics::{ExpertMetrics, LayerLoad};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::moe::{ReportedLayer, reduced_reports};

/// The name of the hook.
pub(super) const NAME: &str = "expert_load";

/// The name of the router reports in the statistics of a step.
pub(super) const REPORTS: &str = "routers";

/// The layers with routers of all stages (at least one).
#[derive(Clone)]
pub(super) struct Routers(pub Vec<ReportedLayer>);

impl Routers {
    pub fn new(layers: &[ReportedLayer]) -> Option<Self> {
        (!layers.is_empty()).then(|| Self(layers.to_vec()))
    }

    /// Adds the reports of the routers about the step, unless another hook has added them. Collective: call on all
    /// ranks of the world.
    pub fn add_reports<M: LanguageModel>(
        &self,
        context: &StepContext<'_, M>,
        added: &mut AddedStatistics,
    ) {
        if !added.contains(REPORTS) {
            let (step, world) = (&context.runner.router_step, context.groups().world());
            let reports = reduced_reports(step, &self.0, context.device, world);
            added.add(REPORTS, reports);
        }
    }
}

/// The hook of a model with experts.
pub(super) struct ExpertLoad(pub Routers);

impl<M: LanguageModel> StepHook<M> for ExpertLoad {
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

    fn metrics(
        &mut self,
        context: &mut StepContext<'_, M>,
        report: &mut StepReport<'_>,
    ) -> Result<(), TrainError> {
        let tokens = report.reading.tokens;
        let mut left = report.added(REPORTS);
        let layer = |layer: &ReportedLayer| {
            let (own, rest) = left.split_at(layer.width());
            left = rest;
            let (load, losses) = own.split_at(layer.experts + 1);
            let (pairs, load) = (load[layer.experts], &load[..layer.experts]);
            let means = losses.iter().map(|sum| sum / tokens as f64);
            LayerLoad {
                layer: layer.path.clone(),
                load: load.iter().map(|tokens| *tokens as u64).collect(),
                dropped: (pairs - load.iter().sum::<f64>()) as u64,
                losses: layer.losses.iter().copied().zip(means).collect(),
            }
        };
        report.experts = Some(ExpertMetrics {
            step: context.step(),
            layers: self.0.0.iter().map(layer).collect(),
        });
        Ok(())
    }
}
