//! `--deterministic` and `--check-replay`.

use std::env;

use burn_megatron::comm::Engine;
use burn_megatron::kernels::gemm::CpuGemm;
use clap::Args;

use crate::error::Error;
use crate::recipe::Recipe;

/// Flags of determinism; each overrides a key of `[train]`.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Training")]
pub struct DeterminismArgs {
    /// Compute every Nth step twice from one state, and compare every result: a difference ends the run with the rank, the
    /// layer and the tensor. Weights and optimizer state are compared between all steps, and a bad loss is computed again.
    #[arg(long, value_name = "N")]
    pub check_replay: Option<usize>,
    /// Refuse, or set to a fixed value, what could change the bits of a run on machines of one kind: libraries of matrix
    /// products, algorithms of NCCL, another layout when a run is resumed. The header says what is set.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub deterministic: Option<bool>,
}

impl DeterminismArgs {
    /// Applies the flags to a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        let train = &mut recipe.train;
        train.check_replay_every = self.check_replay.or(train.check_replay_every);
        train.deterministic = self.deterministic.unwrap_or(train.deterministic);
    }
}

/// Variables of NCCL, and the value that a deterministic run sets: the sum of a ring has one order, and the protocol does not
/// depend on the size.
const NCCL: [(&str, &str); 2] = [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")];

/// Sets what a deterministic recipe sets in this process, and describes all that is fixed; `None` for another recipe. Call it
/// before NCCL is opened and before there are other threads.
pub fn pin(recipe: &Recipe, engine: Engine) -> Option<String> {
    if !recipe.train.deterministic {
        return None;
    }
    let products = match recipe.kernels.gemm {
        CpuGemm::Mkl => "mkl in its reproducible mode",
        _ => "the gemm crate, in one order",
    };
    let mut fixed = vec![format!("products on the CPU by {products}")];
    if engine == Engine::Nccl {
        for (name, value) in NCCL {
            let value = env::var(name).unwrap_or_else(|_| {
                // SAFETY: the ranks and the threads of this process have not started.
                unsafe { env::set_var(name, value) };
                value.into()
            });
            fixed.push(format!("{name}={value}"));
        }
    } else {
        fixed.push(format!(
            "sums between ranks in the order of the ranks ({engine})"
        ));
    }
    fixed.push("another layout is refused when the run is resumed".into());
    Some(fixed.join("; "))
}

/// Keys that change the order of sums, and may not differ when a deterministic run is resumed.
pub const ORDER_OF_SUMS: [&str; 6] = [
    "parallel",
    "kernels",
    "data_parallel.zero_stage",
    "data_parallel.hsdp",
    "data_parallel.hierarchical_reduce",
    "train.micro_batch_size",
];

/// Checks that a deterministic recipe has no library of matrix products whose results may depend on the addresses of its
/// operands.
///
/// # Errors
/// The library, and what fits.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let gemm = recipe.kernels.gemm;
    if recipe.train.deterministic && matches!(gemm, CpuGemm::OpenBlas | CpuGemm::Blis) {
        return Err(format!(
            "deterministic needs products of one order, which {gemm} does not promise; use kernels.gemm = \"gemm\" or \
             \"mkl\" (--kernels gemm=mkl), whose reproducible mode is on, or remove deterministic"
        )
        .into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::Families;
    use crate::flags::parse_text;
    use crate::recipe::DEFAULT_RECIPE;

    fn recipe(flags: &str) -> Recipe {
        let args = parse_text(flags).unwrap();
        let families = Families::transformers();
        Recipe::resolve(&args, &families, DEFAULT_RECIPE)
            .unwrap()
            .recipe
    }

    #[test]
    fn a_library_without_an_order_is_refused() {
        for (flags, fits) in [
            ("", true),
            ("--kernels gemm=openblas", true),
            ("--deterministic", true),
            ("--deterministic --kernels gemm=mkl", true),
            ("--deterministic --kernels gemm=blis", false),
            ("--deterministic --kernels gemm=openblas", false),
        ] {
            let checked = check(&recipe(flags));
            assert_eq!(checked.is_ok(), fits, "{flags}: {checked:?}");
        }
    }

    #[test]
    fn what_is_fixed_is_said() {
        assert_eq!(pin(&recipe(""), Engine::Threads), None);
        let fixed = pin(&recipe("--deterministic"), Engine::Threads).unwrap();
        assert_eq!(
            fixed,
            "products on the CPU by the gemm crate, in one order; sums between ranks in the order of the ranks (threads); \
             another layout is refused when the run is resumed"
        );
        let train = recipe("--check-replay 20 --deterministic").train;
        assert_eq!(
            (train.check_replay_every, train.deterministic),
            (Some(20), true)
        );
    }
}
