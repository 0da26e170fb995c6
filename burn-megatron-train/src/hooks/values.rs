//! The values that a training step passes to its hooks.

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

/// The input of the forward pass, the backward pass and the gradient reduction of a step.
#[derive(Clone)]
pub struct StepInput<'a> {
    /// The micro-batches of the step on this rank.
    pub batches: &'a [Batch],
    /// The index of the step, counted from 0.
    pub step: usize,
    /// The data-parallel index of the rank to which the micro-batches belong.
    pub data_rank: usize,
    /// The loss scale on the device, if the host has not read it yet.
    pub(crate) loss_scale: Option<Tensor<1>>,
}

/// The result of the forward pass, the backward pass and the gradient reduction of a step.
pub struct StepRun {
    /// The reduced gradients, before clipping.
    pub gradients: Gradients,
    pub(crate) losses: StepLosses,
    pub(crate) record: ReductionRecord,
}

/// Tensors that hooks add to the statistics of a step. The host reads the statistics and all added tensors with one
/// copy from the device.
#[derive(Default)]
pub struct AddedStatistics(pub(crate) Vec<(&'static str, Tensor<1>)>);

impl AddedStatistics {
    /// Adds a flat tensor, which must be on the device of the model. All tensors are converted to the dtype of the
    /// statistics: f64 on the CPU, and f32 on GPUs.
    pub fn add(&mut self, name: &'static str, tensor: Tensor<1>) {
        self.0.push((name, tensor));
    }

    /// Returns whether a tensor with this name was added.
    pub fn contains(&self, name: &str) -> bool {
        self.0.iter().any(|(added, _)| *added == name)
    }
}

/// A step whose statistics are available and whose update has not started. A hook can skip the update.
pub struct StepDecision<'a> {
    pub(crate) input: &'a StepInput<'a>,
    pub(crate) samples: &'a dyn Samples,
    pub(crate) losses: &'a [Tensor<1>],
    pub(crate) gradients: &'a Gradients,
    pub(crate) statistics: &'a StepStatistics,
    pub(crate) skip: Option<SkipReason>,
}

impl StepDecision<'_> {
    /// Skips the update of the step. [`SkipReason::Spike`] counts the step as a spike, and [`SkipReason::NotFinite`]
    /// also lowers a dynamic loss scale. All ranks must skip the same steps, so the hook must use a collective to agree
    /// on the decision. The hook must also return an error from [`deferral_error`](super::StepHook::deferral_error).
    pub fn skip(&mut self, reason: SkipReason) {
        self.skip.get_or_insert(reason);
    }

    /// Returns the reason for which a hook has skipped the step, or `None` if no hook has skipped it.
    pub fn skipped(&self) -> Option<SkipReason> {
        self.skip
    }

    /// Returns whether all losses and gradients are finite, and at least one token has a target. This method waits for
    /// the device.
    pub fn is_valid<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> bool {
        self.reading(context).is_taken()
    }

    /// Returns the mean cross-entropy of the step over all ranks. This method waits for the device.
    pub fn loss<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> f64 {
        let (batches, reading) = (self.input.batches.len(), self.reading(context));
        MeanLoss::of_step(context.ddp, batches, reading).loss
    }

    /// Returns the norm of the gradients of all parameters before clipping. This method waits for the device.
    pub fn gradient_norm<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> f64 {
        self.reading(context).norm
    }

    pub(crate) fn reading<M: LanguageModel>(&self, context: &StepContext<'_, M>) -> &StepReading {
        self.statistics.reading(context.ddp)
    }
}

/// The update of the weights in a step, which may be skipped.
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
    /// Returns whether the optimizer step is launched. If readings are deferred, the optimizer step is always launched,
    /// but it does not change the weights if [`taken`](Self::taken) is 0.
    pub fn launches(&self) -> bool {
        self.launches
    }

    /// Returns a tensor `[1]` on the device that is 1 if the step updates the weights, and 0 if the update is skipped.
    pub fn taken(&self) -> Tensor<1> {
        match self.statistics.taken() {
            taken if self.skipped => taken.zeros_like(),
            taken => taken,
        }
    }

    /// Returns the tensor that a hook has [added](AddedStatistics::add) to the statistics under this name, or `None` if
    /// there is no such tensor.
    pub fn added(&self, name: &str) -> Option<&Tensor<1>> {
        self.statistics.added(name)
    }
}

/// The metrics of a step, which the host has read.
pub struct StepReport<'a> {
    /// The metrics that are reported to the observer.
    pub metrics: StepMetrics,
    /// The metrics of the experts, if the model has experts.
    pub experts: Option<ExpertMetrics>,
    pub(crate) reading: &'a StepReading,
}

impl StepReport<'_> {
    /// Returns the values of the tensor that a hook has [added](AddedStatistics::add) to the statistics under this
    /// name. The slice is empty if there is no such tensor.
    pub fn added(&self, name: &str) -> &[f64] {
        self.reading.added(name)
    }
}
