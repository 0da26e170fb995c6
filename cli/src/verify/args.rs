//! The flags of `verify`.

use std::path::PathBuf;

use burn_megatron_verify::Layout;
use clap::{Args, ValueEnum};

use crate::fp8::Fp8Choice;
use crate::set::SetArgs;

/// Flags of `verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// Layouts, such as `tp2-sp-dp2,tp4`: tpN tensor, sp sequence parallel, tpring or tpbulk its overlap, dpN data,
    /// ppN pipeline, mbN samples per micro-batch, zN ZeRO stage, hsdpN ranks per sharding group, nodeN ranks per
    /// node. After a slash follow the pipeline schedule and the stages per rank, as in `pp2-mb1/interleaved/v2`. The
    /// default is tensor {1,2,4} x sequence parallel {off,on} x data {1,2}, thirteen pipelines, twelve sharded
    /// layouts, and further settings in some layouts. For models with experts, the default is eighteen layouts of
    /// expert ranks. For a recipe, the default is its own layout.
    #[arg(long, value_delimiter = ',', value_name = "LAYOUT,..")]
    pub layouts: Vec<Layout>,
    /// Models to verify: small transformers (gpt, gpt-untied, llama, llama-tied, mixtral, mixtral-shared, olmoe,
    /// gpt-oss, gemma, deepseek), or registered families with their default settings, in the default layouts that
    /// they support. `burn-megatron` verifies the small transformers by default. Other commands verify the registered
    /// families.
    #[arg(long, value_delimiter = ',', value_name = "MODEL,..")]
    pub models: Vec<String>,
    /// Verify a recipe instead, with its batch size and all settings that affect the computation, on random tokens.
    /// --layouts overrides its layout, zero_stage, hsdp and micro-batches. Use a small model, because verify computes
    /// in f64.
    #[arg(
        long,
        visible_alias = "config",
        value_name = "FILE.toml",
        conflicts_with = "models"
    )]
    pub recipe: Option<PathBuf>,
    /// Show that `verify` detects published defects of other frameworks. Each defect is planted in a small model and
    /// run in a layout that exposes it, and the failed checks are printed. Takes seconds.
    #[arg(long, exclusive = true)]
    pub faults: bool,
    /// Compare with a step that another framework computed. The folder holds a Hugging Face model, its gradients
    /// under the same names in `gradients/`, and `step.json` with tokens, targets and loss. Scripts in cli/foreign/
    /// write such a folder. The bound is --tolerance, by default 1e-4, or 5e-2 for steps in 16 bits.
    #[arg(
        long,
        value_name = "FOLDER",
        conflicts_with_all = [
            "recipe", "models", "layouts", "all", "kernels", "packed", "global_batch_size", "fp8", "lora", "precision", "seed",
        ]
    )]
    pub against: Option<PathBuf>,
    /// Keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Verify every model with three seeds, every setting, the types f32 and bf16, and all FP8 scaling recipes. Takes
    /// minutes.
    #[arg(long, conflicts_with_all = ["recipe", "layouts", "fp8", "precision", "seed"])]
    pub all: bool,
    /// Operations that use fused kernels; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Pack several documents into each sample. Tokens do not attend to other documents.
    #[arg(long)]
    pub packed: bool,
    /// Samples per step. The default is 8, or the global batch size of the recipe.
    #[arg(long, visible_alias = "batch-size", value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Optimizer steps before the weights are compared.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub steps: u16,
    /// Multiply in FP8 in the linear layers of the blocks, with this scaling recipe. The single rank uses FP8 too.
    #[arg(long, value_name = "delayed|current|blockwise|mxfp8|none")]
    pub fp8: Option<Fp8Choice>,
    /// Verify models with adapters on these layers, given by their peft names. All other parameters are frozen, and
    /// both factors of each adapter have random values. Without a value, all layers of the attention and the MLPs
    /// have adapters.
    #[arg(
        long,
        value_name = "MODULE,..",
        value_delimiter = ',',
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "all-linear",
        conflicts_with_all = ["recipe", "all"]
    )]
    pub lora: Vec<String>,
    /// Compute in this type. The default is f64 for any precision of the recipe. The bound for narrower types follows
    /// from the type, and is printed.
    #[arg(long, value_enum, value_name = "f64|f32|bf16")]
    pub precision: Option<VerifyType>,
    /// Largest relative difference that passes if only the order of summation differs. The default is 1e-10. Layouts
    /// that round differently from one rank have a wider bound, which is printed.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = tolerance)]
    pub tolerance: Option<f64>,
    /// Seed of weights, dropout and tokens. The default is 1, or the seed of the recipe.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// Types in which `verify` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyType {
    /// 64 bits, with rounding errors far below the effect of any mistake.
    #[value(aliases = ["fp64", "float64"])]
    F64,
    /// 32 bits.
    #[value(aliases = ["fp32", "float32"])]
    F32,
    /// 16 bits, with master weights in f32.
    #[value(alias = "bfloat16")]
    Bf16,
}

/// Parses a tolerance.
fn tolerance(text: &str) -> Result<f64, String> {
    let tolerance = text.parse().ok();
    let tolerance = tolerance.filter(|tolerance: &f64| tolerance.is_finite() && *tolerance >= 0.0);
    tolerance.ok_or_else(|| "expected a finite number of at least 0, such as 1e-10".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::parse;

    #[test]
    fn a_tolerance_is_a_bound() {
        let verify = |tolerance: &str| {
            let flag = format!("--tolerance={tolerance}");
            let args = parse::<VerifyArgs>(&[&flag]);
            args.map(|args| args.tolerance)
                .map_err(|error| error.to_string())
        };
        assert_eq!(verify("1e-9"), Ok(Some(1e-9)));
        assert_eq!(verify("0"), Ok(Some(0.0)));
        for wrong in [
            "nan", "NaN", "inf", "-inf", "infinity", "-1", "-1e-300", "1e999", "x", "",
        ] {
            let error = verify(wrong).unwrap_err();
            assert!(
                error.contains("expected a finite number of at least 0, such as 1e-10"),
                "{wrong}: {error}"
            );
        }
        let apart = parse::<VerifyArgs>(&["--tolerance", "-1"]);
        let error = apart.map(drop).unwrap_err();
        assert!(
            error.to_string().contains("a finite number of at least 0"),
            "{error}"
        );
    }
}
