//! The training loop, and what a person sees of it.
//!
//! [`Trainer`] runs one rank: micro-batches, backward, reduction, clipping, AdamW, evaluation. What
//! it measures goes to an [`Observer`], such as one that shows [`progress`], writes [`metrics`] and
//! draws a [`plot`] into a [`run_folder`].

mod config;
mod error;
mod json_float;
mod json_lines;
mod losses;
pub mod metrics;
mod micro_batches;
mod observer;
pub mod plot;
pub mod progress;
mod resume;
pub mod run_folder;
mod save;
pub mod schedule;
mod trainer;

pub use crate::generate::GenerateConfig;
pub use crate::model::{LanguageModel, Tokens};
pub use crate::nn::{LossTerm, Losses};
pub use config::{ConfigError, TrainConfig};
pub use error::TrainError;
pub use observer::{Observer, ObserverError, Silent};
pub use save::{Saved, Saver, Saving};
pub use trainer::{Outcome, Pipeline, Trainer};
