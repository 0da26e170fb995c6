//! The `burn-megatron` command. [`CommandLine`] provides the same command line for user-defined models.

// This module comes first, because all other modules use its macros.
#[macro_use]
mod stdio;

mod allocator;
mod banner;
mod byte_size;
mod check_gpu;
mod checkpoint;
mod cli;
mod command_line;
mod companions;
mod compare;
mod conformance;
mod consistency;
mod convert;
mod cpus;
mod data;
mod data_parallel;
mod determinism;
mod documents;
mod engines;
mod env;
mod epilogues;
mod error;
mod estimate;
mod family;
mod file_size_limit;
mod final_sample;
#[cfg(test)]
mod flags;
mod fp8;
mod gemm_algorithms;
mod gemm_tuning;
mod generate;
mod header;
mod help;
#[doc(hidden)]
pub mod internal;
mod interrupt;
mod kernel_cases;
mod launch;
mod lora;
mod memory;
mod memory_limit;
mod metrics_writer;
mod model_folder;
mod nccl;
mod nodes;
mod numbers;
mod origins;
mod parallel_plan;
mod plan;
mod preprocess;
mod pretrain;
#[cfg(test)]
mod published_recipes;
mod rank_run;
mod ranks;
mod recipe;
mod replaced_folder;
mod resume;
mod resume_check;
mod resume_mode;
mod save_hf;
mod saving;
mod schedule;
mod set;
mod settings;
mod slow_progress;
mod terminal;
mod timed_steps;
mod timing;
mod trace;
mod verify;
mod verify_progress;
mod weights;

pub use command_line::CommandLine;

use error::Error;
use family::Families;
use recipe::Recipe;

/// Checks that the text of a recipe (TOML) can be parsed, and that its parallel layout is valid. The recipe is checked
/// alone, without values from flags or other recipes.
///
/// # Errors
///
/// Returns an error that names the invalid key and the expected value.
pub fn check_recipe(text: &str) -> Result<(), Error> {
    Recipe::parse(text, &Families::transformers())?.plan()?;
    Ok(())
}
