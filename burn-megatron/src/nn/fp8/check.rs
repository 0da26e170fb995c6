//! Whether settings have a meaning.

use super::Fp8Error;
use super::config::{Fp8Config, Fp8Recipe};
use crate::glob::Glob;

/// Binary orders of magnitude: beyond, `448 2^-margin` leaves what scales can make of it.
const MARGIN: i32 = 64;

/// More is a mistake: every step of it is read for every new scale.
const HISTORY: usize = 1 << 20;

impl Fp8Config {
    /// Finds the first setting without a meaning; no layer is needed for that.
    ///
    /// # Errors
    ///
    /// [`Fp8Error::Setting`] and [`Fp8Error::Pattern`].
    pub fn check(&self) -> Result<(), Fp8Error> {
        self.globs().map(drop)?;
        if !(0.0..=1.0).contains(&self.saturation_limit) {
            let fits = "it is a share of the values, from 0 to 1";
            return Err(setting("saturation_limit", self.saturation_limit, fits));
        }
        let layers = self
            .layers
            .iter()
            .filter_map(|layers| layers.recipe.as_ref());
        let recipes: Vec<_> = self.recipe.iter().chain(layers).collect();
        if self.first_last_bf16 > 0 && recipes.is_empty() {
            let fits =
                "without a recipe all blocks compute in the type of the model; choose one, or 0";
            return Err(setting("first_last_bf16", self.first_last_bf16, fits));
        }
        recipes.into_iter().try_for_each(Fp8Recipe::check)
    }

    /// The patterns of [`layers`](Self::layers).
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
            Self::Delayed(of) if !(-MARGIN..=MARGIN).contains(&of.margin) => Err(setting(
                "margin",
                of.margin,
                "it is a number of binary orders of magnitude, from -64 to 64",
            )),
            Self::Delayed(of) if !(1..=HISTORY).contains(&of.history) => Err(setting(
                "history",
                of.history,
                "it is a number of steps, from 1 to 1048576",
            )),
            Self::Current(of) if !(of.epsilon.is_finite() && of.epsilon >= 0.0) => Err(setting(
                "epsilon",
                of.epsilon,
                "it is a magnitude, finite and at least 0",
            )),
            _ => Ok(()),
        }
    }
}

fn setting(name: &'static str, value: impl ToString, fits: &'static str) -> Fp8Error {
    Fp8Error::Setting {
        name,
        value: value.to_string(),
        fits,
    }
}
