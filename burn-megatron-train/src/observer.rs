//! Observers, which receive the measurements of a run.

use burn::tensor::Tensor;

use super::SavedCheckpoint;
use super::expert_metrics::ExpertMetrics;
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
use burn_megatron::data_parallel::InvalidGradient;
use burn_megatron::nn::ParameterTable;
use burn_megatron::optim::StepReading;

/// The error of an observer, for example because the disk is full.
pub type ObserverError = Box<dyn std::error::Error + Send + Sync>;

/// The gradients of a step, which are reduced over all ranks. They are already unscaled, but not yet clipped.
pub struct StepGradients<'a> {
    /// The step, counted from 1.
    pub step: usize,
    /// The table of the parameters and their placement on the ranks.
    pub table: &'a ParameterTable,
    pub(super) reading: &'a dyn Fn() -> &'a StepReading,
    pub(super) gather: &'a dyn Fn() -> Vec<Tensor<1>>,
}

impl StepGradients<'_> {
    /// Returns the norm of the gradients of all parameters on all ranks. This method waits for the device.
    pub fn norm(&self) -> f64 {
        (self.reading)().norm
    }

    /// Returns the invalid gradients that this rank found before the gradients were reduced. This method waits for the
    /// device.
    pub fn invalid(&self) -> &[InvalidGradient] {
        &(self.reading)().invalid_gradients
    }

    /// Returns the gradient of each parameter, gathered over the data axis, in the order of the parameters in `table`.
    /// Each tensor has the shape `[elements]` and is the gradient of the part of the parameter that this model-parallel
    /// rank holds. This method waits for the device. Collective: call on all ranks of the data axis.
    pub fn full(&self) -> Vec<Tensor<1>> {
        (self.gather)()
    }
}

/// An observer of a run. It receives the measurements of the run and can stop the run.
///
/// ```
/// use burn_megatron_train::metrics::{HeldOutMetrics, StepMetrics, StepTiming};
/// use burn_megatron_train::{Observer, ObserverError};
///
/// /// Stops the run when the loss is below a limit.
/// struct StopBelow {
///     limit: f64,
///     loss: f64,
/// }
///
/// impl Observer for StopBelow {
///     fn step(&mut self, metrics: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
///         self.loss = metrics.loss;
///         Ok(())
///     }
///
///     fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
///         Ok(())
///     }
///
///     fn stop(&self) -> bool {
///         self.loss < self.limit
///     }
/// }
///
/// let mut observer = StopBelow { limit: 2.0, loss: f64::INFINITY };
/// let metrics = StepMetrics { step: 1, loss: 1.5, ..StepMetrics::default() };
/// let timing = StepTiming { step: 1, seconds: 0.1, tokens_per_second: 1e4, flops_per_second: 1e9 };
/// observer.step(&metrics, &timing)?;
/// assert!(observer.stop());
/// # Ok::<(), ObserverError>(())
/// ```
pub trait Observer {
    /// Called in each step after the gradients are reduced and before they are clipped, even if the step will be
    /// skipped. Gradients are only gathered if the observer calls [`StepGradients::full`].
    ///
    /// # Errors
    ///
    /// An error ends the run. The other ranks fail in their next collective.
    fn gradients(&mut self, gradients: &StepGradients<'_>) -> Result<(), ObserverError> {
        let _ = gradients;
        Ok(())
    }

    /// Called after each step, in order. If the run [defers](super::Trainer::defer_readings) its readings, the method
    /// is called one step later.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError>;

    /// Called after [`step`](Self::step), for the same step, if the model has experts.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn experts(&mut self, metrics: &ExpertMetrics) -> Result<(), ObserverError> {
        let _ = metrics;
        Ok(())
    }

    /// Called after each evaluation on held-out text.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError>;

    /// Called on rank 0 when a checkpoint has been published.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn saved(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        let _ = saved;
        Ok(())
    }

    /// Returns whether the run should stop after this step. If any rank returns true, all ranks stop after the same
    /// step. If the run [defers](super::Trainer::defer_readings) its readings, the ranks stop up to three steps later.
    fn stop(&self) -> bool {
        false
    }
}

/// An observer that does nothing.
pub struct NoopObserver;

impl Observer for NoopObserver {
    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}
