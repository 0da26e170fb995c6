//! The optimizer of a run: its name, its settings and its parameter groups.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::error::OptimizerError;
use super::groups::{self, GroupError, ParameterGroup};
use super::muon::MuonConfig;
use super::rules::{
    AdagradConfig, AdamConfig, AdamWConfig, AdanConfig, LionConfig, RmsPropConfig, SgdConfig,
};
use super::setting;

/// The optimizer of a run and its settings. In a recipe:
///
/// ```toml
/// [train.optimizer]
/// name = "lion"           # default "adamw"
/// beta2 = 0.98            # the settings of that optimizer
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema, strum::Display, strum::IntoStaticStr)]
#[serde(tag = "name", rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum OptimizerConfig {
    /// AdamW, which is the default.
    AdamW(AdamWConfig),
    /// Muon for hidden weight matrices, and AdamW for all other parameters.
    Muon(MuonConfig),
    /// Stochastic gradient descent.
    Sgd(SgdConfig),
    /// Adam, with weight decay that is added to the gradient (L2 regularization).
    Adam(AdamConfig),
    /// Adan.
    Adan(AdanConfig),
    /// Lion.
    Lion(LionConfig),
    /// RMSProp.
    RmsProp(RmsPropConfig),
    /// Adagrad.
    Adagrad(AdagradConfig),
}

/// The names of [`OptimizerConfig`].
const NAMES: &str = "adamw, muon, sgd, adam, adan, lion, rmsprop or adagrad";

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::AdamW(AdamWConfig::default())
    }
}

impl From<AdamWConfig> for OptimizerConfig {
    fn from(config: AdamWConfig) -> Self {
        Self::AdamW(config)
    }
}

impl<'de> Deserialize<'de> for OptimizerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Named {
            #[serde(default = "default_name")]
            name: String,
            #[serde(flatten)]
            settings: toml::Table,
        }
        fn default_name() -> String {
            "adamw".into()
        }
        let Named { name, settings } = Named::deserialize(deserializer)?;
        let read = match &name[..] {
            "adamw" => settings.try_into().map(Self::AdamW),
            "muon" => settings.try_into().map(Self::Muon),
            "sgd" => settings.try_into().map(Self::Sgd),
            "adam" => settings.try_into().map(Self::Adam),
            "adan" => settings.try_into().map(Self::Adan),
            "lion" => settings.try_into().map(Self::Lion),
            "rmsprop" => settings.try_into().map(Self::RmsProp),
            "adagrad" => settings.try_into().map(Self::Adagrad),
            _ => return Err(serde::de::Error::custom(unknown(&name))),
        };
        read.map_err(|error: toml::de::Error| {
            serde::de::Error::custom(format!("optimizer {name}: {}", error.message()))
        })
    }
}

fn unknown(name: &str) -> String {
    let reason = match name {
        "lamb" | "adafactor" => {
            "it requires norms or means of whole tensors, but a rank has only a shard; "
        }
        "lbfgs" => "it requires several evaluations of the loss in a step; ",
        _ => "",
    };
    format!("invalid optimizer name {name:?}: {reason}expected {NAMES}")
}

/// Evaluates an expression for the settings of any optimizer.
macro_rules! for_any {
    ($optimizer:expr, $config:ident => $value:expr) => {
        match $optimizer {
            OptimizerConfig::AdamW($config) => $value,
            OptimizerConfig::Muon($config) => $value,
            OptimizerConfig::Sgd($config) => $value,
            OptimizerConfig::Adam($config) => $value,
            OptimizerConfig::Adan($config) => $value,
            OptimizerConfig::Lion($config) => $value,
            OptimizerConfig::RmsProp($config) => $value,
            OptimizerConfig::Adagrad($config) => $value,
        }
    };
}

impl OptimizerConfig {
    /// Returns the name of the optimizer in a recipe.
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// Returns the AdamW settings, or `None` if the optimizer does not use AdamW. Muon uses AdamW for the parameters
    /// that are not hidden matrices.
    pub fn adamw(&self) -> Option<&AdamWConfig> {
        match self {
            Self::AdamW(config) => Some(config),
            Self::Muon(config) => Some(&config.adamw),
            _ => None,
        }
    }

    /// Whether the optimizer is AdamW, which has a fused kernel.
    pub fn is_adamw(&self) -> bool {
        matches!(self, Self::AdamW(_))
    }

    /// Returns the maximum number of state tensors per parameter. Each tensor has the size of the parameter.
    pub fn state_tensors(&self) -> u8 {
        match self {
            Self::AdamW(_) | Self::Muon(_) => 2,
            Self::Sgd(config) => u8::from(config.momentum != 0.0),
            Self::Adam(config) => 2 + u8::from(config.amsgrad),
            Self::Adan(_) => 4,
            Self::Lion(_) | Self::Adagrad(_) => 1,
            // The centered mean square is stored in addition to the mean and the mean square.
            Self::RmsProp(config) => {
                1 + 2 * u8::from(config.centered) + u8::from(config.momentum != 0.0)
            }
        }
    }

    /// Sets epsilon to 1 in the settings of AdamW and Adam, including the AdamW settings of Muon. The updates are then
    /// about proportional to the gradients. Returns the changed configuration.
    pub fn with_gradient_steps(mut self) -> Self {
        match &mut self {
            Self::AdamW(config) => config.epsilon = 1.0,
            Self::Muon(config) => config.adamw.epsilon = 1.0,
            Self::Adam(config) => config.epsilon = 1.0,
            _ => {}
        }
        self
    }

    /// Returns the parameter groups.
    pub fn groups(&self) -> &[ParameterGroup] {
        for_any!(self, config => &config.groups)
    }

    /// Checks the settings and the parameter groups of the optimizer.
    ///
    /// ```
    /// use burn_megatron::optim::OptimizerConfig;
    ///
    /// let config: OptimizerConfig = toml::from_str("name = 'lion'\nbeta2 = 0.98")?;
    /// config.check()?;
    /// assert_eq!(config.name(), "lion");
    /// let config: OptimizerConfig = toml::from_str("name = 'adamw'\nbeta1 = 1.5")?;
    /// assert!(config.check().is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] for the first setting that is out of its range. [`OptimizerError::Group`] for the
    /// first invalid group, or for a group that selects an optimizer in a run without Muon.
    pub fn check(&self) -> Result<(), OptimizerError> {
        setting::check(for_any!(self, config => config.settings()))?;
        groups::check(self.groups())?;
        if let Self::Muon(config) = self {
            config.check_adamw()?;
        }
        let chooses = |group: &&ParameterGroup| group.optimizer.is_some();
        match (self, self.groups().iter().find(chooses)) {
            (Self::Muon(_), _) | (_, None) => Ok(()),
            (_, Some(group)) => Err(GroupError::OneOptimizer {
                pattern: group.pattern.clone(),
                name: self.name(),
            }
            .into()),
        }
    }
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
