//! 8-bit layers: the flags, what must fit, the line of the header, and the table of a report.

use std::str::FromStr;

use burn_megatron::nn::fp8::{Fp8Config, Fp8Format, Fp8Recipe, UnknownRecipe};
use clap::{Args, ValueEnum};

use crate::recipe::{Error, Recipe};

pub mod report;
#[cfg(test)]
mod tests;

/// Flags of 8-bit layers; each one takes the place of a key of `[fp8]`.
#[derive(Args, Debug, Default)]
pub struct Fp8Args {
    /// Multiply in 8 bits in the linear layers of the blocks, with this recipe for the scales; none
    /// takes what the recipe file says back.
    #[arg(long, value_name = "delayed|current|blockwise|mxfp8|none")]
    pub fp8: Option<Fp8Choice>,
    /// Formats in 8 bits: hybrid has E4M3 for values and E5M2 for gradients, e4m3 has E4M3 for both.
    /// blockwise and mxfp8 have E4M3 for both in any case.
    #[arg(long, value_enum, value_name = "hybrid|e4m3")]
    pub fp8_format: Option<Fp8FormatChoice>,
    /// Blocks at the beginning of the model, and as many at its end, that compute in the type of
    /// --precision.
    #[arg(long, value_name = "N")]
    pub first_last_bf16: Option<usize>,
    /// Keep the inputs of 8-bit layers for the backward in 8 bits.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub fp8_save_activations: Option<bool>,
    /// Gather the weights of 8-bit layers in 8 bits after a sharded step; for --zero-stage 1 and 2.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub fp8_param_gather: Option<bool>,
    /// Measure the 8-bit layers in the last step: a table at the end, and fp8.json in the run folder.
    #[arg(long)]
    pub fp8_report: bool,
}

/// A recipe, or none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fp8Choice(pub Option<Fp8Recipe>);

impl FromStr for Fp8Choice {
    type Err = UnknownRecipe;

    fn from_str(name: &str) -> Result<Self, UnknownRecipe> {
        match name {
            "none" => Ok(Self(None)),
            name => name.parse().map(|recipe| Self(Some(recipe))),
        }
    }
}

/// The formats, as flags name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fp8FormatChoice {
    /// E4M3 for values, E5M2 for gradients.
    Hybrid,
    /// E4M3 for both.
    E4m3,
}

impl Fp8Args {
    /// Puts what was given into a recipe.
    pub fn apply(&self, recipe: &mut Recipe) {
        match self.fp8 {
            // What the recipe says of its 8-bit layers has no meaning any more.
            Some(Fp8Choice(None)) => {
                recipe.fp8 = Fp8Config::default();
                recipe.data_parallel.fp8_param_gather = false;
            }
            // The name alone keeps the settings that the recipe has for it.
            Some(Fp8Choice(Some(new))) => match &recipe.fp8.recipe {
                Some(old) if old.name() == new.name() => {}
                _ => recipe.fp8.recipe = Some(new),
            },
            None => {}
        }
        let (config, sharing) = (&mut recipe.fp8, &mut recipe.data_parallel);
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

/// Whether some layer may be one of 8 bits.
pub fn is_on(config: &Fp8Config) -> bool {
    config.recipe.is_some() || config.layers.iter().any(|layers| layers.recipe.is_some())
}

/// Finds the first setting of 8-bit layers that is not right, or would do nothing.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let config = &recipe.fp8;
    if is_on(config) {
        config.check()?;
        let (ends, layers) = (config.first_last_bf16, recipe.model.layers);
        return match ends.saturating_mul(2) < layers {
            true => Ok(()),
            false => Err(format!(
                "first_last_bf16 = {ends} leaves no block of {layers} to compute in 8 bits; at most \
                 {} does",
                layers.saturating_sub(1) / 2,
            )
            .into()),
        };
    }
    let defaults = Fp8Config::default();
    for (name, given) in [
        ("fp8.format", config.format != defaults.format),
        ("fp8.first_last_bf16", config.first_last_bf16 != 0),
        ("fp8.save_activations", config.save_activations),
        (
            "fp8.saturation_limit",
            config.saturation_limit != defaults.saturation_limit,
        ),
        ("fp8_param_gather", recipe.data_parallel.fp8_param_gather),
    ] {
        if given {
            return Err(idle(name));
        }
    }
    Ok(())
}

/// Finds a flag that would do nothing.
pub fn check_report(recipe: &Recipe, args: &Fp8Args) -> Result<(), Error> {
    match args.fp8_report && !is_on(&recipe.fp8) {
        true => Err(idle("--fp8-report")),
        false => Ok(()),
    }
}

fn idle(name: &str) -> Error {
    format!(
        "{name} is about layers that multiply in 8 bits, and this run has none; choose a recipe (--fp8 \
         delayed, current, blockwise or mxfp8), or leave {name} out"
    )
    .into()
}

/// What the header says of 8-bit layers: `delayed, E4M3 and E5M2 for gradients; ...`.
pub fn describe(config: &Fp8Config, layers: usize, engine: &str) -> String {
    let Some(recipe) = &config.recipe else {
        return format!("as the patterns say; products: {engine}");
    };
    let [values, gradients] = config.format.of(recipe);
    let formats = match values == gradients {
        true => format!("{values:?}"),
        false => format!("{values:?}, gradients {gradients:?}"),
    };
    let ends = match config.first_last_bf16 {
        0 => "all blocks".into(),
        ends => format!("blocks {ends} to {}", layers - ends - 1),
    };
    let saved = match config.save_activations {
        true => ", inputs wait in 8 bits",
        false => "",
    };
    let name = recipe.name();
    format!("{name}, {formats}; {ends}{saved}; products: {engine}")
}
