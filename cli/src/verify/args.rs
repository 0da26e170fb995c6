//! The flags of `verify`.

use std::path::PathBuf;

use burn_megatron_verify::Layout;
use clap::{Args, ValueEnum};

use crate::fp8::Fp8Choice;
use crate::set::SetArgs;

/// Flags of `verify`.
#[derive(Args)]
pub struct VerifyArgs {
    /// Layouts to verify, such as `tp2-sp-dp2,tp4`. The main parts of a layout are tpN (tensor-parallel ranks), sp
    /// (sequence parallelism), dpN (data-parallel ranks) and ppN (pipeline-parallel ranks). Other parts are tpring or
    /// tpbulk (overlap of tensor-parallel communication), mbN (samples per micro-batch), zN (ZeRO stage), hsdpN (ranks
    /// per sharding group) and nodeN (ranks per node). The pipeline schedule and the number of stages per rank are
    /// written after slashes, as in `pp2-mb1/interleaved/v2`. By default, all combinations of 1, 2 and 4
    /// tensor-parallel ranks, sequence parallelism off and on, and 1 and 2 data-parallel ranks are verified. The
    /// default also includes thirteen layouts with pipelines, twelve sharded layouts, and further settings in some
    /// layouts. For models with experts, the default is eighteen layouts with expert parallelism. For a recipe, the
    /// default is the layout of the recipe.
    #[arg(long, value_delimiter = ',', value_name = "LAYOUT,..")]
    pub layouts: Vec<Layout>,
    /// Models to verify: small transformers (gpt, gpt-untied, llama, llama-tied, mixtral, mixtral-shared, olmoe,
    /// gpt-oss, gemma, deepseek), or registered model families. A registered family is verified with its default
    /// settings, in the default layouts that it supports. By default, `burn-megatron` verifies the small transformers,
    /// and other commands verify their registered families.
    #[arg(long, value_delimiter = ',', value_name = "MODEL,..")]
    pub models: Vec<String>,
    /// Verify the model of a recipe instead, on random tokens. The batch size and all settings that affect the
    /// computation are taken from the recipe. --layouts replaces the layout, zero_stage, hsdp and the micro-batches of
    /// the recipe. The model should be small, because verify computes in f64.
    #[arg(
        long,
        visible_alias = "config",
        value_name = "FILE.toml",
        conflicts_with = "models"
    )]
    pub recipe: Option<PathBuf>,
    /// Show that `verify` detects published defects of other frameworks. Each defect is injected into a small model,
    /// which runs in a layout in which the defect has an effect. The checks that fail are printed. This takes a few
    /// seconds.
    #[arg(long, exclusive = true)]
    pub faults: bool,
    /// Compare one training step with the same step in another framework. The folder contains a Hugging Face model, the
    /// gradients of its tensors with the same names in `gradients/`, and `step.json` with the tokens, the targets and
    /// the loss. Scripts in cli/foreign/ write such a folder. The largest relative difference that passes is
    /// --tolerance. Its default is 1e-4, or 5e-2 for 16-bit steps.
    #[arg(
        long,
        value_name = "FOLDER",
        conflicts_with_all = [
            "recipe", "models", "layouts", "all", "kernels", "packed", "global_batch_size", "fp8", "lora", "precision", "seed",
        ]
    )]
    pub against: Option<PathBuf>,
    /// Flags that set keys of the recipe.
    #[command(flatten)]
    pub set: SetArgs,
    /// Verify every model with three seeds, every setting, the dtypes f32 and bf16, and all FP8 scaling recipes. This
    /// takes minutes.
    #[arg(long, conflicts_with_all = ["recipe", "layouts", "fp8", "precision", "seed"])]
    pub all: bool,
    /// Operations that use fused kernels; see `pretrain --help`.
    #[arg(long, value_name = "CHOICE|OPERATION=CHOICE,..")]
    pub kernels: Vec<String>,
    /// Pack several documents into each sample. Tokens attend only to tokens of the same document.
    #[arg(long)]
    pub packed: bool,
    /// Number of samples per step. The default is 8, or the global batch size of the recipe.
    #[arg(long, visible_alias = "batch-size", value_name = "N")]
    pub global_batch_size: Option<usize>,
    /// Number of optimizer steps before the weights are compared.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub steps: u16,
    /// Compute the linear layers of the blocks in FP8, with this scaling recipe. The reference run on one rank also
    /// uses FP8.
    #[arg(long, value_name = "delayed|current|blockwise|mxfp8|none")]
    pub fp8: Option<Fp8Choice>,
    /// Verify models with LoRA adapters on these layers, given by their names in peft. All other parameters are frozen.
    /// Both matrices of each adapter are initialized with random values. Without a value, all linear layers of
    /// attention and MLPs have adapters.
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
    /// Dtype of the computation. The default is f64, whatever the precision of the recipe is. For narrower dtypes, the
    /// largest relative difference that passes depends on the dtype, and is printed.
    #[arg(long, value_enum, value_name = "f64|f32|bf16")]
    pub precision: Option<VerifyType>,
    /// Largest relative difference that passes if only the order of additions differs between a layout and one rank.
    /// The default is 1e-10. If a layout also rounds other values than a run on one rank does, the bound is larger and
    /// is printed.
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = tolerance)]
    pub tolerance: Option<f64>,
    /// Seed of the weights, dropout and the random tokens. The default is 1, or the seed of the recipe.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// Dtypes in which `verify` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VerifyType {
    /// 64-bit floats, whose rounding errors are far smaller than the effect of any mistake.
    #[value(aliases = ["fp64", "float64"])]
    F64,
    /// 32-bit floats.
    #[value(aliases = ["fp32", "float32"])]
    F32,
    /// bfloat16, with master weights in f32.
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
