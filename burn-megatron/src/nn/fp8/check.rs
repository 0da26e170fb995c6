//! Validation of FP8 settings.

use super::Fp8Error;
use super::config::{Fp8Config, Fp8Recipe};
use crate::glob::Glob;

/// The largest absolute margin. With a larger margin, `448 2^-margin` is outside the range of scales.
const MAX_MARGIN: i32 = 64;

/// The maximum history length. The complete history is read for every new scale.
const MAX_HISTORY: usize = 1 << 20;

impl Fp8Config {
    /// Checks the settings that can be checked without a model.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Setting`] or [`Fp8Error::Pattern`] for the first invalid setting.
    pub fn check(&self) -> Result<(), Fp8Error> {
        self.globs().map(drop)?;
        if !(0.0..=1.0).contains(&self.saturation_limit) {
            let expected = "a fraction from 0 to 1";
            return Err(setting("saturation_limit", self.saturation_limit, expected));
        }
        let layers = self
            .layers
            .iter()
            .filter_map(|layers| layers.recipe.as_ref());
        let recipes: Vec<_> = self.recipe.iter().chain(layers).collect();
        if self.first_last_bf16 > 0 && recipes.is_empty() {
            let expected = "0 without a recipe";
            return Err(setting("first_last_bf16", self.first_last_bf16, expected));
        }
        recipes.into_iter().try_for_each(Fp8Recipe::check)
    }

    /// Returns the patterns of [`layers`](Self::layers).
    pub(super) fn globs(&self) -> Result<Vec<Glob>, Fp8Error> {
        let glob = |pattern: &String| {
            Glob::parse(pattern).map_err(|fault| Fp8Error::Pattern {
                pattern: pattern.clone(),
                fault,
            })
        };
        self.layers
            .iter()
            .map(|layers| glob(&layers.pattern))
            .collect()
    }
}

impl Fp8Recipe {
    fn check(&self) -> Result<(), Fp8Error> {
        match self {
            Self::Delayed(of) if !(-MAX_MARGIN..=MAX_MARGIN).contains(&of.margin) => {
                Err(setting("margin", of.margin, "an integer from -64 to 64"))
            }
            Self::Delayed(of) if !(1..=MAX_HISTORY).contains(&of.history) => Err(setting(
                "history",
                of.history,
                "a number of steps from 1 to 1048576",
            )),
            Self::Current(of) if !(of.epsilon.is_finite() && of.epsilon >= 0.0) => Err(setting(
                "epsilon",
                of.epsilon,
                "a finite number, at least 0",
            )),
            _ => Ok(()),
        }
    }
}

fn setting(name: &'static str, value: impl ToString, expected: &'static str) -> Fp8Error {
    Fp8Error::Setting {
        name,
        value: value.to_string(),
        expected,
    }
}
