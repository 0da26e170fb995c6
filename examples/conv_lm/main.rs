//! A command line for a model with a custom layer: `pretrain`, `verify`, `generate`, `checkpoint` and `launch` of a
//! transformer that has a gated convolution in place of attention in most layers (`mixer.rs`, `config.rs`).
//!
//! ```text
//! cargo run --release -p burn-megatron-examples --bin conv_lm -- verify
//! cargo run --release -p burn-megatron-examples --bin conv_lm -- pretrain
//! ```

mod config;
mod mixer;

use std::process::ExitCode;

use burn_megatron_cli::CommandLine;

use config::ConvLmConfig;

fn main() -> ExitCode {
    CommandLine::new("conv_lm")
        .with_family("conv", ConvLmConfig::default())
        .with_recipe(include_str!("conv.toml"))
        .run()
}
