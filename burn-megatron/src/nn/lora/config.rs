//! Settings of low-rank adapters.

use std::fmt;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::nn::BuildError;

/// A kind of linear layer that can have a LoRA adapter. The names are the layer names of Llama, as in `target_modules`
/// of `peft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LoraTarget {
    /// The query projection.
    Q,
    /// The key projection.
    K,
    /// The value projection.
    V,
    /// The output projection of attention.
    O,
    /// The gate projection of a gated MLP.
    Gate,
    /// The up projection of a gated MLP, or the first layer of an MLP without a gate.
    Up,
    /// The second layer of an MLP.
    Down,
}

impl LoraTarget {
    /// All targets.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// Returns the name of the target, such as `q_proj`.
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

    /// Returns the target with this name, or `None` if there is no such target.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }

    /// Returns whether the target is a layer of an MLP.
    pub fn is_mlp(self) -> bool {
        matches!(self, Self::Gate | Self::Up | Self::Down)
    }
}

impl fmt::Display for LoraTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The value of `target_modules` that selects every [`LoraTarget`] that the model has.
const ALL_LINEAR: &str = "all-linear";

/// Configuration of low-rank adaptation (LoRA; Hu et al. 2021, arXiv:2106.09685). All parameters of the model are
/// frozen. Each target layer computes `x W + s (x A) B` instead of `x W`, with `A` `[in, rank]`, `B` `[rank, out]` and
/// `s = alpha / rank`. Only `A` and `B` are trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoraConfig {
    /// The rank of the adapters (`r` in `peft`), at least 1.
    #[schemars(extend("resume" = "never"))]
    pub rank: usize,
    /// The numerator of the scale `s` (`lora_alpha` in `peft`).
    pub alpha: f64,
    /// Whether the scale is `s = alpha / sqrt(rank)` (`use_rslora` in `peft`; Kalajdzievski 2023, arXiv:2312.03732).
    pub rslora: bool,
    /// The probability of dropout on the input of the adapters (`lora_dropout` in `peft`). The adapters of one fused
    /// layer, such as the QKV projection, share one dropout mask.
    pub dropout: f64,
    /// The folder of the base model (`base_model_name_or_path` in `peft`). This field only records the folder. The
    /// weights of the base model are loaded separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("resume" = "may_differ", "value" = "PATH"))]
    pub base_model: Option<PathBuf>,
    /// The layers that get adapters: [names](LoraTarget) such as `q_proj`, or `all-linear` for every layer that can
    /// have an adapter.
    pub target_modules: Vec<String>,
    /// Whether `B` is initialized to 0, so that the initial model is unchanged (`init_lora_weights` in `peft`). If
    /// false, `B` is drawn from a uniform distribution in `[-1 / sqrt(rank), 1 / sqrt(rank)]`, for tests. `A` is always
    /// drawn from a uniform distribution in `[-1 / sqrt(in), 1 / sqrt(in)]` (Kaiming uniform with `a = sqrt(5)`).
    pub init_lora_weights: bool,
}

impl Default for LoraConfig {
    /// Returns the defaults of `peft` for Llama: rank 8, alpha 8, and adapters on the query and value projections.
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
    /// Returns the folder of the base model, if it is set.
    pub fn base(&self) -> Option<&Path> {
        self.base_model.as_deref()
    }

    /// Returns the scale `s`. The output of the adapters is multiplied by this scale.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Returns whether the targets are listed by name. The model must then have each listed target.
    pub fn names_targets(&self) -> bool {
        self.target_modules != [ALL_LINEAR]
    }

    /// Returns the targets, in the order of [`LoraTarget::ALL`].
    pub fn targets(&self) -> Vec<LoraTarget> {
        let is_named = |target: &LoraTarget| {
            !self.names_targets() || self.target_modules.iter().any(|name| name == target.name())
        };
        LoraTarget::ALL.into_iter().filter(is_named).collect()
    }

    /// Checks the settings that can be checked without a model.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for the first invalid setting.
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
