//! The `burn-megatron` command.

use std::process::ExitCode;

use burn_megatron_cli::CommandLine;

fn main() -> ExitCode {
    CommandLine::default().run()
}
