//! The training loop.

pub mod metrics;
mod model;
pub mod plot;
pub mod progress;
pub mod run_folder;
pub mod schedule;

pub use model::LanguageModel;
