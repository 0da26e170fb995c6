//! What happens with the numbers of a run.

use super::Saved;
use super::metrics::{HeldOutMetrics, StepMetrics, StepTiming};

/// An error of an observer, such as a full disk.
pub type ObserverError = Box<dyn std::error::Error + Send + Sync>;

/// Watches a run, and may stop it.
pub trait Observer {
    /// A step was made.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn step(&mut self, metrics: &StepMetrics, timing: &StepTiming) -> Result<(), ObserverError>;

    /// The model was evaluated.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn held_out(&mut self, metrics: &HeldOutMetrics) -> Result<(), ObserverError>;

    /// A checkpoint was published; known to the first rank alone.
    ///
    /// # Errors
    ///
    /// An error ends the run.
    fn saved(&mut self, saved: &Saved) -> Result<(), ObserverError> {
        let _ = saved;
        Ok(())
    }

    /// Whether to stop after this step. One rank that says so stops all.
    fn stop(&self) -> bool {
        false
    }
}

/// Watches nothing.
pub struct Silent;

impl Observer for Silent {
    fn step(&mut self, _: &StepMetrics, _: &StepTiming) -> Result<(), ObserverError> {
        Ok(())
    }

    fn held_out(&mut self, _: &HeldOutMetrics) -> Result<(), ObserverError> {
        Ok(())
    }
}
