//! The training loop, and what a person sees of it.
//!
//! [`Trainer`] runs one rank: micro-batches, backward, reduction, clipping, AdamW, evaluation. What
//! it measures goes to an [`Observer`], such as one that shows [`progress`], writes [`metrics`] and
//! draws a [`plot`] into a [`run_folder`].

mod config;
mod error;
mod generate;
pub mod metrics;
mod micro_batches;
mod model;
mod observer;
pub mod plot;
pub mod progress;
pub mod run_folder;
pub mod schedule;
mod trainer;

pub use config::{ConfigError, TrainConfig};
pub use error::TrainError;
pub use generate::GenerateConfig;
use generate::generate;
pub use model::{LanguageModel, Tokens};
pub use observer::{Observer, ObserverError, Silent};
pub use trainer::{Outcome, Pipeline, Trainer};
