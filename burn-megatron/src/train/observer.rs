//! Receives the measurements of a run.

use super::SavedCheckpoint;
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming};

/// An error of an observer, such as a full disk.
pub type ObserverError = Box<dyn std::error::Error + Send + Sync>;

/// Observes a run, and may stop it.
pub trait Observer {
    /// Called after each step.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError>;

    /// Called after each evaluation.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError>;

    /// Called when a checkpoint has been published, on rank 0 only.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn saved(&mut self, saved: &SavedCheckpoint) -> Result<(), ObserverError> {
        let _ = saved;
        Ok(())
    }

    /// Whether to stop after this step. If any rank returns true, all ranks stop.
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
