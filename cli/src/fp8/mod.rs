//! FP8 layers: the flags, the checks, the line of the header, and the report.

use std::str::FromStr;

use burn_megatron::nn::fp8::{Fp8Config, Fp8Recipe, UnknownFp8Recipe};

use crate::error::Error;
use crate::recipe::Recipe;
use crate::settings::SettingFlags;

pub mod report;
#[cfg(test)]
mod tests;

/// FP8 recipe, or none.
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

/// Returns whether any layer may compute in FP8.
pub fn is_on(config: &Fp8Config) -> bool {
    config.recipe.is_some() || config.layers.iter().any(|layers| layers.recipe.is_some())
}

/// Checks the settings of FP8 layers, and that each setting has an effect.
pub fn check(recipe: &Recipe) -> Result<(), Error> {
    let config = &recipe.fp8;
    if is_on(config) {
        config.check()?;
        let (ends, layers) = (config.first_last_bf16, recipe.model.layers());
        return if ends.saturating_mul(2) < layers {
            Ok(())
        } else {
            Err(format!(
                "invalid first_last_bf16 = {ends} for {layers} layers: expected at most {}, so that at least one block \
                 computes in FP8",
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

/// Checks that --fp8-report and --fp8.save_activations have an effect.
pub fn check_flags(recipe: &Recipe, report: bool, flags: &SettingFlags) -> Result<(), Error> {
    let flags = [
        ("--fp8-report", report),
        ("--fp8.save_activations", flags.has("fp8.save_activations")),
    ];
    match flags.into_iter().find(|(_, given)| *given) {
        Some((name, _)) if !is_on(&recipe.fp8) => Err(no_fp8_layers(name)),
        _ => Ok(()),
    }
}

fn no_fp8_layers(name: &str) -> Error {
    format!(
        "{name} requires FP8 layers, but this run has none; set a scaling recipe (--fp8 delayed, current, blockwise \
         or mxfp8), or remove {name}"
    )
    .into()
}

/// Returns the line of the header: `delayed, E4M3 and E5M2 for gradients; ...`.
pub fn describe(config: &Fp8Config, layers: usize, engine: &str) -> String {
    let Some(recipe) = &config.recipe else {
        return format!("per layer, by patterns; matmul: {engine}");
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
        ", inputs saved in FP8"
    } else {
        ""
    };
    let name = recipe.name();
    format!("{name}, {formats}; {ends}{saved}; matmul: {engine}")
}
