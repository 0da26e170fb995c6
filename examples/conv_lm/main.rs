//! A command line for a model that is not ours: `pretrain`, `verify`, `generate`, `checkpoint` and `launch` of a
//! convolutional language model made of Burn's own modules (`model.rs`, `config.rs`).
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin conv_lm -- verify
//! cargo run --release -p burn-megatron-examples --bin conv_lm -- pretrain
//! ```

mod config;
mod model;

use std::process::ExitCode;

use burn_megatron_cli::CommandLine;

use config::ConvLmConfig;

fn main() -> ExitCode {
    CommandLine::new("conv_lm")
        .with_family("conv", ConvLmConfig::default())
        .with_recipe(include_str!("conv.toml"))
        .run()
}
