//! The values that the points of a step pass to a hook.

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
    /// The index on the data axis of the rank whose micro-batches they are.
    pub data_rank: usize,
    /// The loss scale on the device, if the host does not know it.
    pub(crate) loss_scale: Option<Tensor<1>>,
}

/// The result of the forwards, the backwards and the reduction of a step.
pub struct StepRun {
    /// The reduced gradients, before clipping.
    pub gradients: Gradients,
    pub(crate) losses: StepLosses,
    pub(crate) record: ReductionRecord,
}

/// Tensors that hooks add to the statistics of a step. One copy from the device reads the statistics and all of them.
#[derive(Default)]
pub struct AddedStatistics(pub(crate) Vec<(&'static str, Tensor<1>)>);

impl AddedStatistics {
    /// Adds a flat tensor on the device of the model. All tensors are read as numbers of the type of the statistics,
    /// which is f64 on the CPU and f32 on GPUs.
    pub fn add(&mut self, name: &'static str, tensor: Tensor<1>) {
        self.0.push((name, tensor));
    }

    /// Returns whether a tensor has this name.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|(added, _)| *added == name)
    }
}

/// A step whose statistics are known, before it is decided whether its update is skipped.
pub struct StepDecision<'a> {
    pub(crate) input: &'a StepInput<'a>,
    pub(crate) samples: &'a dyn Samples,
    pub(crate) losses: &'a [Tensor<1>],
    pub(crate) gradients: &'a Gradients,
    pub(crate) statistics: &'a StepStatistics,
    pub(crate) skip: Option<SkipReason>,
}

impl StepDecision<'_> {
    /// Skips the update. [`SkipReason::Spike`] counts as a spike, [`SkipReason::NotFinite`] also lowers a dynamic loss
    /// scale. All ranks must skip the same steps, so a hook agrees on the decision by a collective. It must return an
    /// error from [`deferral_error`](super::StepHook::deferral_error).
    pub fn skip(&mut self, reason: SkipReason) {
        self.skip.get_or_insert(reason);
    }

    /// Returns the reason for which a hook skips the step.
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
    /// Returns whether the optimizer is launched. Where readings are deferred it is always launched, and changes nothing
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

    /// Returns a tensor that a hook has [added](AddedStatistics::add) to the statistics.
    pub fn added(&self, name: &str) -> Option<&Tensor<1>> {
        self.statistics.added(name)
    }
}

/// The metrics of a step on the host.
pub struct StepReport<'a> {
    /// The metrics that the observer gets.
    pub metrics: StepMetrics,
    /// The load of the experts, in a model with experts.
    pub experts: Option<ExpertMetrics>,
    pub(crate) reading: &'a StepReading,
}

impl StepReport<'_> {
    /// Returns the values of a tensor that a hook has [added](AddedStatistics::add) to the statistics; none if no tensor
    /// has this name.
    pub fn added(&self, name: &str) -> &[f64] {
        self.reading.added(name)
    }
}
