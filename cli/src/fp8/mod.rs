//! 8-bit layers: the flags, the checks, the line of the header, and the report.

use std::str::FromStr;

use burn_megatron::data_parallel::DataParallelConfig;
use burn_megatron::nn::fp8::{Fp8Config, Fp8Format, Fp8Recipe, UnknownFp8Recipe};
use clap::{Args, ValueEnum};

use crate::error::Error;
use crate::recipe::Recipe;

pub mod report;
#[cfg(test)]
mod tests;

/// Flags of 8-bit layers; each overrides a key of `[fp8]`.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Precision")]
pub struct Fp8Args {
    /// Multiply in 8 bits in the linear layers and the experts of the blocks, with this scaling recipe; none turns it
    /// off.
    #[arg(long, value_name = "delayed|current|blockwise|mxfp8|none")]
    pub fp8: Option<Fp8Choice>,
    /// 8-bit formats: hybrid is E4M3 for values and E5M2 for gradients, e4m3 is E4M3 for both. blockwise and
    /// mxfp8 always use E4M3 for both.
    #[arg(long, value_enum, value_name = "hybrid|e4m3")]
    pub fp8_format: Option<Fp8FormatChoice>,
    /// Number of first blocks, and of last ones, that compute in the type of --precision instead of 8 bits.
    #[arg(long, value_name = "N")]
    pub first_last_bf16: Option<usize>,
    /// Save the inputs of 8-bit layers for the backward in 8 bits; false saves them in the type of --precision.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub fp8_save_activations: Option<bool>,
    /// Gather the weights of 8-bit layers in 8 bits, except those of experts; for --zero-stage 1 and 2.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub fp8_param_gather: Option<bool>,
    /// Measure the quantisation errors in the last step: print a table, and write fp8.json to the run folder.
    #[arg(long)]
    pub fp8_report: bool,
}

/// A recipe, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Choice(pub Option<Fp8Recipe>);

impl FromStr for Fp8Choice {
    type Err = UnknownFp8Recipe;

    fn from_str(name: &str) -> Result<Self, UnknownFp8Recipe> {
        match name {
            "none" => Ok(Self(None)),
            name => name.parse().map(|recipe| Self(Some(recipe))),
        }
    }
}

/// The formats, as flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fp8FormatChoice {
    /// E4M3 for values, E5M2 for gradients.
    Hybrid,
    /// E4M3 for both.
    E4m3,
}

impl Fp8Args {
    /// Applies the flags to the tables of a recipe.
    pub fn apply(&self, config: &mut Fp8Config, sharing: &mut DataParallelConfig) {
        match self.fp8 {
            // The 8-bit settings of the recipe no longer apply.
            Some(Fp8Choice(None)) => {
                *config = Fp8Config::default();
                sharing.fp8_param_gather = false;
            }
            // The same scaling recipe keeps its settings.
            Some(Fp8Choice(Some(new))) => match &config.recipe {
                Some(old) if old.name() == new.name() => {}
                _ => config.recipe = Some(new),
            },
            None => {}
        }
        config.format = match self.fp8_format {
            Some(Fp8FormatChoice::Hybrid) => Fp8Format::Hybrid,
            Some(Fp8FormatChoice::E4m3) => Fp8Format::E4m3,
            None => config.format,
        };
        config.first_last_bf16 = self.first_last_bf16.unwrap_or(config.first_last_bf16);
        for (to, from) in [
            (&mut config.save_activations, self.fp8_save_activations),
            (&mut sharing.fp8_param_gather, self.fp8_param_gather),
        ] {
            *to = from.unwrap_or(*to);
        }
    }
}

/// Whether any layer may compute in 8 bits.
pub fn is_on(config: &Fp8Config) -> bool {
    config.recipe.is_some() || config.layers.iter().any(|layers| layers.recipe.is_some())
}

/// Checks the settings of 8-bit layers, and that each has an effect.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let config = &recipe.fp8;
    if is_on(config) {
        config.check()?;
        let (ends, layers) = (config.first_last_bf16, recipe.model.layers());
        return if ends.saturating_mul(2) < layers {
            Ok(())
        } else {
            Err(format!(
                "invalid first_last_bf16 = {ends} for {layers} layers: expected at most {}, so that a block computes in \
                 8 bits",
                layers.saturating_sub(1) / 2,
            )
            .into())
        };
    }
    let defaults = Fp8Config::default();
    for (name, given) in [
        ("fp8.format", config.format != defaults.format),
        ("fp8.first_last_bf16", config.first_last_bf16 != 0),
        (
            "fp8.saturation_limit",
            config.saturation_limit != defaults.saturation_limit,
        ),
        ("fp8_param_gather", recipe.data_parallel.fp8_param_gather),
    ] {
        if given {
            return Err(no_fp8_layers(name));
        }
    }
    Ok(())
}

/// Checks that --fp8-report and --fp8-save-activations have an effect.
pub fn check_flags(recipe: &Recipe, args: &Fp8Args) -> Result<(), Error> {
    let flags = [
        ("--fp8-report", args.fp8_report),
        (
            "--fp8-save-activations",
            args.fp8_save_activations.is_some(),
        ),
    ];
    match flags.into_iter().find(|(_, given)| *given) {
        Some((name, _)) if !is_on(&recipe.fp8) => Err(no_fp8_layers(name)),
        _ => Ok(()),
    }
}

fn no_fp8_layers(name: &str) -> Error {
    format!(
        "{name} applies to 8-bit layers, and this run has none; set a scaling recipe (--fp8 delayed, current, \
         blockwise or mxfp8), or remove {name}"
    )
    .into()
}

/// The line of the header: `delayed, E4M3 and E5M2 for gradients; ...`.
pub fn describe(config: &Fp8Config, layers: usize, engine: &str) -> String {
    let Some(recipe) = &config.recipe else {
        return format!("per layer, by patterns; products: {engine}");
    };
    let [values, gradients] = config.format.of(recipe);
    let formats = if values == gradients {
        format!("{values:?}")
    } else {
        format!("{values:?}, gradients {gradients:?}")
    };
    let ends = match config.first_last_bf16 {
        0 => "all blocks".into(),
        ends => format!("blocks {ends} to {}", layers - ends - 1),
    };
    let saved = if config.save_activations {
        ", inputs saved in 8 bits"
    } else {
        ""
    };
    let name = recipe.name();
    format!("{name}, {formats}; {ends}{saved}; products: {engine}")
}
