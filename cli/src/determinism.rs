//! Support for `train.deterministic` and `train.check_replay_every`.

use std::env;

use burn_megatron::comm::Engine;
use burn_megatron::kernel_selection::EpilogueFusion;
use burn_megatron::kernels::gemm::CpuGemm;

use crate::error::Error;
use crate::header::Header;
use crate::numbers::count;
use crate::recipe::Recipe;

/// NCCL variables with the values that a deterministic run sets. The sum over a ring has a fixed order, and the
/// protocol does not depend on the size.
const NCCL: [(&str, &str); 2] = [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")];

/// Settings that a deterministic run fixes.
#[derive(Debug, PartialEq, Eq)]
pub struct Pinned {
    pub fixed: String,
    /// The cost of these settings.
    pub cost: String,
}

/// Applies the settings of a deterministic recipe to this process, and describes all fixed settings. Returns `None`
/// for any other recipe. Call it before NCCL is opened and before other threads are started.
pub fn pin(recipe: &Recipe, engine: Engine) -> Option<Pinned> {
    if !recipe.train.deterministic {
        return None;
    }
    let products = match recipe.kernels.gemm {
        CpuGemm::Mkl => "mkl in its reproducible mode",
        _ => "the gemm crate, in one order",
    };
    let mut fixed = vec![format!("matrix products on the CPU by {products}")];
    if let Some(path) = &recipe.kernels.gemm_algorithms {
        fixed.push(format!("algorithms of cuBLASLt from {}", path.display()));
    }
    let cost = if engine == Engine::Nccl {
        let pinned = nccl_variables(|name| env::var(name).ok());
        for (name, value) in &pinned {
            // SAFETY: the ranks and the threads of this process have not started.
            unsafe { env::set_var(name, value) };
            fixed.push(format!("{name}={value}"));
        }
        let layout = recipe.layout();
        let largest = layout.data_parallel_size().max(layout.tensor);
        cost_of(&pinned, largest)
    } else {
        fixed.push(format!(
            "sums between ranks in the order of the ranks ({engine})"
        ));
        "none: these settings are the same without deterministic".into()
    };
    fixed.push("another layout is refused when the run is resumed".into());
    let fixed = fixed.join("; ");
    Some(Pinned { fixed, cost })
}

/// Returns the NCCL variables with their values: the given value, or else the fixed value.
fn nccl_variables(given: impl Fn(&str) -> Option<String>) -> [(&'static str, String); 2] {
    NCCL.map(|(name, value)| (name, given(name).unwrap_or_else(|| value.into())))
}

/// Describes the cost of an all-reduce over `ranks` ranks with these variables.
fn cost_of(variables: &[(&str, String)], ranks: usize) -> String {
    let algorithm = variables.iter().find(|(name, _)| *name == "NCCL_ALGO");
    match algorithm {
        Some((name, value)) if value != "Ring" => format!("the cost of {name}={value}"),
        _ => cost_of_rings(ranks),
    }
}

/// Describes the cost of an all-reduce over `ranks` ranks with NCCL rings. For small messages, the time is
/// proportional to the number of sequential messages.
fn cost_of_rings(ranks: usize) -> String {
    let (ring, tree) = (2 * (ranks - 1), 2 * ranks.next_power_of_two().ilog2());
    format!(
        "an all-reduce over {} takes {} in sequence with a ring, and {tree} with a tree: small all-reduces are slower",
        count(ranks, "rank"),
        count(ring, "message"),
    )
}

/// Adds the fixed settings, their cost and the check of steps to the header.
pub fn print_header(header: &mut Header, recipe: &Recipe, pinned: Option<&Pinned>) {
    if let Some(Pinned { fixed, cost }) = pinned {
        header.detail("fixed", fixed);
        header.detail("cost", cost);
    }
    if let Some(check) = describe_check(recipe) {
        header.line("check", check);
    }
}

/// Describes the cost of the check of steps. Returns `None` without the check.
fn describe_check(recipe: &Recipe) -> Option<String> {
    let every = recipe.train.check_replay_every?;
    let steps = match every {
        1 => "each step is".into(),
        every => format!("one of {} is", count(every, "step")),
    };
    Some(format!(
        "{steps} computed twice, {:.1} % more forwards, backwards and reductions, with a fingerprint of each tensor",
        100.0 / every as f64
    ))
}

/// Checks that a deterministic recipe uses only deterministic implementations. The results of a matrix multiplication
/// library must not depend on the addresses of its operands. The implementation of a layer must not depend on a time
/// measurement.
///
/// # Errors
/// Returns an error that names the setting and the valid values.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let gemm = recipe.kernels.gemm;
    if recipe.train.deterministic && matches!(gemm, CpuGemm::OpenBlas | CpuGemm::Blis) {
        return Err(format!(
            "deterministic requires matrix products with a fixed order of sums, which {gemm} does not guarantee; use \
             kernels.gemm = \"gemm\" or \"mkl\" (--kernels gemm=mkl), whose reproducible mode is on, or remove \
             deterministic"
        )
        .into());
    }
    if recipe.train.deterministic && recipe.kernels.epilogue_fusion == EpilogueFusion::Measured {
        return Err(
            "deterministic conflicts with kernels.epilogue_fusion = \"measured\", whose times may choose another form in \
             the next run: set it to true or false, or remove deterministic"
                .into(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

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
    fn what_may_compute_in_another_order_is_refused() {
        for (flags, fits) in [
            ("", true),
            ("--kernels gemm=openblas", true),
            ("--train.deterministic", true),
            ("--train.deterministic --kernels gemm=mkl", true),
            ("--train.deterministic --kernels gemm=blis", false),
            ("--train.deterministic --kernels gemm=openblas", false),
            ("--kernels epilogue_fusion=measured", true),
            ("--train.deterministic --kernels epilogue_fusion=true", true),
            (
                "--train.deterministic --kernels epilogue_fusion=measured",
                false,
            ),
        ] {
            let checked = check(&recipe(flags));
            assert_eq!(checked.is_ok(), fits, "{flags}: {checked:?}");
        }
    }

    #[test]
    fn chosen_algorithms_are_fixed() {
        let recipe = recipe("--train.deterministic --kernels gemm_algorithms=h100.json");
        let Pinned { fixed, .. } = pin(&recipe, Engine::Threads).unwrap();
        let expected = "in one order; algorithms of cuBLASLt from h100.json; sums";
        assert!(fixed.contains(expected), "{fixed}");
    }

    #[test]
    fn variables_of_nccl_are_set_unless_they_are_given() {
        let fixed = nccl_variables(|_| None);
        let expected = [("NCCL_ALGO", "Ring"), ("NCCL_PROTO", "Simple")];
        assert_eq!(fixed, expected.map(|(name, value)| (name, value.into())));
        assert_eq!(cost_of(&fixed, 64), cost_of_rings(64));
        let given = nccl_variables(|name| (name == "NCCL_ALGO").then(|| "Tree".into()));
        assert_eq!(given[0].1, "Tree");
        assert_eq!(given[1].1, "Simple");
        assert_snapshot!(cost_of(&given, 64), @"the cost of NCCL_ALGO=Tree");
    }

    #[test]
    fn what_is_fixed_is_said_with_its_cost() {
        assert_eq!(pin(&recipe(""), Engine::Threads), None);
        let Pinned { fixed, cost } =
            pin(&recipe("--train.deterministic"), Engine::Threads).unwrap();
        assert_snapshot!(
            fixed,
            @"matrix products on the CPU by the gemm crate, in one order; sums between ranks in the order of \
              the ranks (threads); another layout is refused when the run is resumed"
        );
        assert_snapshot!(cost, @"none: these settings are the same without deterministic");
        assert_snapshot!(
            cost_of_rings(64),
            @"an all-reduce over 64 ranks takes 126 messages in sequence with a ring, and 12 with a tree: small \
              all-reduces are slower"
        );
        let recipe = recipe("--train.check_replay_every 20 --train.deterministic");
        assert!(recipe.train.deterministic);
        assert_snapshot!(
            describe_check(&recipe).unwrap(),
            @"one of 20 steps is computed twice, 5.0 % more forwards, backwards and reductions, with a fingerprint of each tensor"
        );
    }
}
