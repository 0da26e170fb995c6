//! The `burn-megatron-bench overlap` benchmark: measures the share of the communication that is hidden behind
//! computation.

pub mod args;
mod case;
mod data;
mod expert;
mod figures;
mod tensor;

use burn_megatron_cli::internal::Error;

use args::OverlapArgs;

/// Trains over a slow link, and prints the share of the communication that is hidden.
pub fn run(args: &OverlapArgs) -> Result<(), Error> {
    if !args.tensor_parallel.is_empty() {
        return tensor::run(args);
    }
    if !args.expert_parallel.is_empty() {
        return expert::run(args);
    }
    if args.world.engine.is_some() {
        return Err(
            "--engine requires --tensor-parallel: add --tensor-parallel or remove --engine".into(),
        );
    }
    data::run(args)
}
