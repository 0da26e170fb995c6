//! The values that a step passes to its hooks.

use burn::tensor::Tensor;

use super::StepContext;
use crate::expert_metrics::ExpertMetrics;
use crate::losses::MeanLoss;
use crate::metrics::{SkipReason, StepMetrics};
use crate::micro_batches::StepLosses;
use burn_megatron::data_parallel::{Gradients, ReductionRecord};
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{StepReading, StepStatistics};
use burn_megatron_data::{Batch, Samples};

/// The input of a step.
#[derive(Clone)]
pub struct StepInput<'a> {
    /// The micro-batches.
    pub batches: &'a [Batch],
    /// The index of the step, from 0.
    pub step: usize,
    /// The data-axis index of the rank that the micro-batches belong to.
    pub data_rank: usize,
    /// The loss scale on the device, if the host has not read it yet.
    pub(crate) loss_scale: Option<Tensor<1>>,
}

/// The result of the forward, backward and reduction of a step.
pub struct StepRun {
    /// The reduced gradients, before clipping.
    pub gradients: Gradients,
    pub(crate) losses: StepLosses,
    pub(crate) record: ReductionRecord,
}

/// Tensors that hooks add to the statistics of a step. The statistics and all tensors are read with one copy from the
/// device.
#[derive(Default)]
pub struct AddedStatistics(pub(crate) Vec<(&'static str, Tensor<1>)>);

impl AddedStatistics {
    /// Adds a flat tensor on the device of the model. All tensors are read in the type of the statistics: f64 on the
    /// CPU, and f32 on GPUs.
    pub fn add(&mut self, name: &'static str, tensor: Tensor<1>) {
        self.0.push((name, tensor));
    }

    /// Returns whether a tensor has this name.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|(added, _)| *added == name)
    }
}

/// A step whose statistics are known, before the decision to skip its update.
pub struct StepDecision<'a> {
    pub(crate) input: &'a StepInput<'a>,
    pub(crate) samples: &'a dyn Samples,
    pub(crate) losses: &'a [Tensor<1>],
    pub(crate) gradients: &'a Gradients,
    pub(crate) statistics: &'a StepStatistics,
    pub(crate) skip: Option<SkipReason>,
}

impl StepDecision<'_> {
    /// Skips the update. [`SkipReason::Spike`] counts as a spike, and [`SkipReason::NotFinite`] also lowers a dynamic
    /// loss scale. All ranks must skip the same steps, so the hook must agree on the decision with a collective. It
    /// must also return an error from [`deferral_error`](super::StepHook::deferral_error).
    pub fn skip(&mut self, reason: SkipReason) {
        self.skip.get_or_insert(reason);
    }

    /// Returns the reason for which a hook skips the step, if any.
    pub fn skipped(&self) -> Option<SkipReason> {
        self.skip
    }

    /// Returns whether all losses and gradients are finite, and there are targets. Waits for the device.
    pub fn is_valid<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> bool {
        self.reading(context).is_taken()
    }

    /// Returns the mean cross-entropy of the step over all ranks. Waits for the device.
    pub fn loss<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> f64 {
        let (batches, reading) = (self.input.batches.len(), self.reading(context));
        MeanLoss::of_step(context.ddp, batches, reading).loss
    }

    /// Returns the norm of the gradients of all parameters before clipping. Waits for the device.
    pub fn gradient_norm<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> f64 {
        self.reading(context).norm
    }

    pub(crate) fn reading<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> &StepReading {
        self.statistics.reading(context.ddp)
    }
}

/// The update of a step: whether it changes the weights.
pub struct StepUpdate<'a> {
    pub(crate) statistics: &'a StepStatistics,
    /// Whether a hook skips the step.
    pub(crate) skipped: bool,
    /// Whether the optimizer is launched.
    pub(crate) launches: bool,
    /// Whether the optimizer reads the outcome on the device.
    pub(crate) by_outcome: bool,
}

impl StepUpdate<'_> {
    /// Returns whether the optimizer is launched. If readings are deferred, it is always launched, and changes nothing
    /// if [`taken`](Self::taken) is 0.
    pub fn launches(&self) -> bool {
        self.launches
    }

    /// Returns 1 if the step is taken, and 0 if it is skipped, on the device: `[1]`.
    pub fn taken(&self) -> Tensor<1> {
        match self.statistics.taken() {
            taken if self.skipped => taken.zeros_like(),
            taken => taken,
        }
    }

    /// Returns the tensor that a hook has [added](AddedStatistics::add) to the statistics under this name.
    pub fn added(&self, name: &str) -> Option<&Tensor<1>> {
        self.statistics.added(name)
    }
}

/// The metrics of a step on the host.
pub struct StepReport<'a> {
    /// The metrics for the observer.
    pub metrics: StepMetrics,
    /// The load of the experts, in a model with experts.
    pub experts: Option<ExpertMetrics>,
    pub(crate) reading: &'a StepReading,
}

impl StepReport<'_> {
    /// Returns the values of a tensor that a hook has [added](AddedStatistics::add) to the statistics. Empty if no
    /// tensor has this name.
    pub fn added(&self, name: &str) -> &[f64] {
        self.reading.added(name)
    }
}
