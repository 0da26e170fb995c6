//! The `burn-megatron` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    burn_megatron_cli::main()
}
