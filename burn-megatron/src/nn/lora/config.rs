//! Which layers have adapters, as settings.

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::nn::BuildError;

/// A linear layer that can have an adapter, by its name in Llama, which is also that in `peft`'s `target_modules`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LoraTarget {
    /// The queries.
    Q,
    /// The keys.
    K,
    /// The values.
    V,
    /// The output of attention.
    O,
    /// The gate of a gated MLP.
    Gate,
    /// The values of a gated MLP, or the first layer of another one.
    Up,
    /// The second layer of an MLP.
    Down,
}

impl LoraTarget {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Its name, such as `q_proj`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q_proj",
            Self::K => "k_proj",
            Self::V => "v_proj",
            Self::O => "o_proj",
            Self::Gate => "gate_proj",
            Self::Up => "up_proj",
            Self::Down => "down_proj",
        }
    }

    /// The one with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }

    /// Whether it is a layer of an MLP.
    pub fn is_mlp(self) -> bool {
        matches!(self, Self::Gate | Self::Up | Self::Down)
    }
}

impl fmt::Display for LoraTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// In the place of names: every layer of [`LoraTarget`] that the model has.
const ALL_LINEAR: &str = "all-linear";

/// Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685): every parameter of the model is frozen, and the product of
/// each target layer becomes `x W + s (x A) B` with `A` `[in, rank]`, `B` `[rank, out]` and `s = alpha / rank`. Only
/// the factors are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// `r` of `peft`: at least 1.
    #[schemars(extend("resume" = "never"))]
    pub rank: usize,
    /// `lora_alpha` of `peft`.
    pub alpha: f64,
    /// `use_rslora` of `peft`: `s = alpha / sqrt(rank)` (Kalajdzievski 2023, arXiv:2312.03732).
    pub rslora: bool,
    /// `lora_dropout` of `peft`: dropout of the input of the adapters. The adapters of a fused layer, such as queries,
    /// keys and values, share one mask.
    pub dropout: f64,
    /// The folder of the model that was adapted: `base_model_name_or_path` of `peft`. Nothing is read from it here: whoever
    /// loads the weights does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("resume" = "may_differ", "value" = "PATH"))]
    pub base_model: Option<PathBuf>,
    /// The layers with adapters: [names](LoraTarget) such as `q_proj`, or `all-linear` for all linear layers.
    pub target_modules: Vec<String>,
    /// `init_lora_weights` of `peft`: `A` is uniform between `-1 / sqrt(in)` and `1 / sqrt(in)` (Kaiming with `a =
    /// sqrt(5)`), and `B` is 0. If false, `B` is uniform between `-1 / sqrt(rank)` and `1 / sqrt(rank)`, for tests.
    pub init_lora_weights: bool,
}

impl Default for LoraConfig {
    /// The defaults of `peft` for Llama: rank 8, alpha 8, queries and values.
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            rslora: false,
            dropout: 0.0,
            base_model: None,
            target_modules: vec!["q_proj".into(), "v_proj".into()],
            init_lora_weights: true,
        }
    }
}

impl LoraConfig {
    /// Returns the folder of the model that was adapted.
    pub fn base(&self) -> Option<&Path> {
        self.base_model.as_deref()
    }

    /// `s`.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Whether the targets are named one by one, so that each must be in the model.
    pub fn names_targets(&self) -> bool {
        self.target_modules != [ALL_LINEAR]
    }

    /// The targets, in the order of [`LoraTarget::ALL`].
    pub fn targets(&self) -> Vec<LoraTarget> {
        let is_named = |target: &LoraTarget| {
            !self.names_targets() || self.target_modules.iter().any(|name| name == target.name())
        };
        LoraTarget::ALL.into_iter().filter(is_named).collect()
    }

    /// Checks the settings; needs no model.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for the first invalid one.
    pub fn check(&self) -> Result<(), BuildError> {
        let refused = |message: String| {
            let path = "lora".into();
            Err(BuildError::Config { path, message })
        };
        if self.rank == 0 {
            return refused("invalid rank = 0: expected at least 1".into());
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            let alpha = self.alpha;
            return refused(format!(
                "invalid alpha = {alpha}: expected a finite number above 0"
            ));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            return refused(format!(
                "invalid dropout = {}: expected at least 0 and below 1",
                self.dropout
            ));
        }
        let names = &self.target_modules;
        let fits = LoraTarget::ALL.map(LoraTarget::name).join(", ");
        if names.is_empty() {
            return refused(format!(
                "target_modules is empty: expected some of {fits}, or {ALL_LINEAR} alone"
            ));
        }
        for (number, name) in names.iter().enumerate() {
            if names[..number].contains(name) {
                return refused(format!("target_modules has {name} twice: expected it once"));
            }
            let alone = name == ALL_LINEAR && names.len() == 1;
            if !alone && LoraTarget::of_name(name).is_none() {
                return refused(format!(
                    "invalid target_modules with {name:?}: expected some of {fits}, or {ALL_LINEAR} alone"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_settings_are_named() {
        let valid = LoraConfig::default();
        assert!(valid.check().is_ok());
        let refused = |change: &dyn Fn(&mut LoraConfig)| {
            let mut config = valid.clone();
            change(&mut config);
            config.check().unwrap_err().to_string()
        };
        let targets = |names: &'static [&'static str]| {
            refused(&|config| {
                config.target_modules = names.iter().map(ToString::to_string).collect()
            })
        };
        let names = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj";
        for (found, wanted) in [
            (
                refused(&|config| config.rank = 0),
                "lora: invalid rank = 0: expected at least 1".to_string(),
            ),
            (
                refused(&|config| config.alpha = f64::NAN),
                "lora: invalid alpha = NaN: expected a finite number above 0".into(),
            ),
            (
                refused(&|config| config.dropout = 1.0),
                "lora: invalid dropout = 1: expected at least 0 and below 1".into(),
            ),
            (
                targets(&["c_attn"]),
                format!(
                    "lora: invalid target_modules with \"c_attn\": expected some of {names}, or all-linear alone"
                ),
            ),
            (
                targets(&["o_proj", "all-linear"]),
                format!(
                    "lora: invalid target_modules with \"all-linear\": expected some of {names}, or all-linear alone"
                ),
            ),
            (
                targets(&["o_proj", "o_proj"]),
                "lora: target_modules has o_proj twice: expected it once".into(),
            ),
            (
                targets(&[]),
                format!(
                    "lora: target_modules is empty: expected some of {names}, or all-linear alone"
                ),
            ),
        ] {
            assert_eq!(found, wanted);
        }
    }

    #[test]
    fn the_scale_is_that_of_peft() {
        let mut config = LoraConfig {
            rank: 4,
            alpha: 16.0,
            ..LoraConfig::default()
        };
        assert_eq!(config.scale(), 4.0);
        config.rslora = true;
        assert_eq!(config.scale(), 8.0);
    }
}
