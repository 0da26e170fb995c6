//! The settings of the element-wise optimizers of Burn.

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGrad, AdaGradConfig as BurnAdaGradConfig, Adam, AdamConfig as BurnAdamConfig, AdamW,
    AdamWConfig as BurnAdamWConfig, Adan, AdanConfig as BurnAdanConfig, Lion,
    LionConfig as BurnLionConfig, Optimizer, RmsProp, RmsPropConfig as BurnRmsPropConfig, Sgd,
    SgdConfig as BurnSgdConfig,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::OptimizerError;
use super::groups::{self, ParameterGroup};
use super::setting::{self, Setting, above_zero, beta, factor, weight_decay};

/// Settings of one of Burn's element-wise optimizers.
pub(super) trait RuleConfig {
    /// The optimizer.
    type Rule: Optimizer;

    /// The optimizer for parameters whose weight decay is multiplied by `decay`.
    fn build(&self, decay: f64) -> Self::Rule;

    /// The settings, to be checked.
    fn settings(&self) -> Vec<Setting>;
}

/// The epsilon for Burn's AdamW where the setting is 0: the root of the smallest normal f32, below the root of
/// every normal second moment. It makes the step 0 instead of NaN where no gradient has been received.
const MIN_EPSILON: f32 = 1.084_202_2e-19;

/// Decay that is added to the gradient.
fn penalty(weight_decay: f64) -> Option<WeightDecayConfig> {
    (weight_decay != 0.0).then(|| WeightDecayConfig::new(weight_decay as f32))
}

/// Settings of stochastic gradient descent: `v = momentum v + (1 - dampening) g`, `p = p - lr v`, with `v = g` in the
/// first step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SgdConfig {
    /// Decay of the velocity; 0 for none.
    pub momentum: f64,
    /// The share of each gradient that the velocity leaves out.
    pub dampening: f64,
    /// Whether the step is `g + momentum v` (Nesterov).
    pub nesterov: bool,
    /// Times the parameter, added to the gradient.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            momentum: 0.9,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
            groups: vec![],
        }
    }
}

impl RuleConfig for SgdConfig {
    type Rule = Sgd;

    fn build(&self, decay: f64) -> Sgd {
        let momentum = (self.momentum != 0.0).then_some(MomentumConfig {
            momentum: self.momentum,
            dampening: self.dampening,
            nesterov: self.nesterov,
        });
        BurnSgdConfig::new()
            .with_momentum(momentum)
            .with_weight_decay(penalty(self.weight_decay * decay))
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("momentum", self.momentum),
            beta("dampening", self.dampening),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay; none for [norms and biases](crate::nn::ParameterEntry::decay), unless a group sets it.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate, selected by path patterns.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            groups: vec![],
        }
    }
}

impl AdamWConfig {
    /// Checks the settings, in the f32 in which moments are computed, and the groups.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] for the first setting out of its range, [`OptimizerError::Group`] for the
    /// first invalid group.
    pub fn check(&self) -> Result<(), OptimizerError> {
        setting::check(self.settings())?;
        Ok(groups::check(&self.groups)?)
    }
}

impl RuleConfig for AdamWConfig {
    type Rule = AdamW;

    fn build(&self, decay: f64) -> AdamW {
        let epsilon = match self.epsilon as f32 {
            0.0 => MIN_EPSILON,
            epsilon => epsilon,
        };
        BurnAdamWConfig::new()
            .with_beta_1(self.beta1 as f32)
            .with_beta_2(self.beta2 as f32)
            .with_epsilon(epsilon)
            .with_weight_decay((self.weight_decay * decay) as f32)
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("beta1", self.beta1),
            beta("beta2", self.beta2),
            above_zero("epsilon", self.epsilon),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of Adam (Kingma and Ba 2015, arXiv:1412.6980), whose decay is added to the gradient.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdamConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Whether the largest second moment so far is used (AMSGrad, Reddi et al. 2018).
    pub amsgrad: bool,
    /// Times the parameter, added to the gradient.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            amsgrad: false,
            weight_decay: 0.0,
            groups: vec![],
        }
    }
}

impl RuleConfig for AdamConfig {
    type Rule = Adam;

    fn build(&self, decay: f64) -> Adam {
        BurnAdamConfig::new()
            .with_beta_1(self.beta1 as f32)
            .with_beta_2(self.beta2 as f32)
            .with_epsilon(self.epsilon as f32)
            .with_amsgrad(self.amsgrad)
            .with_weight_decay(penalty(self.weight_decay * decay))
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("beta1", self.beta1),
            beta("beta2", self.beta2),
            above_zero("epsilon", self.epsilon),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of Adan (Xie et al. 2022, arXiv:2208.06677), in the paper's notation with `1 - beta` for its betas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdanConfig {
    /// Decay of the gradient.
    pub beta1: f64,
    /// Decay of the difference of two gradients.
    pub beta2: f64,
    /// Decay of the second moment.
    pub beta3: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay: the parameter is divided by `1 + lr w`.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for AdanConfig {
    fn default() -> Self {
        Self {
            beta1: 0.98,
            beta2: 0.92,
            beta3: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.02,
            groups: vec![],
        }
    }
}

impl RuleConfig for AdanConfig {
    type Rule = Adan;

    fn build(&self, decay: f64) -> Adan {
        BurnAdanConfig::new()
            .with_beta_1(self.beta1 as f32)
            .with_beta_2(self.beta2 as f32)
            .with_beta_3(self.beta3 as f32)
            .with_epsilon(self.epsilon as f32)
            .with_weight_decay((self.weight_decay * decay) as f32)
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("beta1", self.beta1),
            beta("beta2", self.beta2),
            beta("beta3", self.beta3),
            above_zero("epsilon", self.epsilon),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of Lion (Chen et al. 2023, arXiv:2302.06675): the sign of `beta1 m + (1 - beta1) g`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct LionConfig {
    /// Decay of the momentum in the step.
    pub beta1: f64,
    /// Decay of the momentum itself.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.1,
            groups: vec![],
        }
    }
}

impl RuleConfig for LionConfig {
    type Rule = Lion;

    fn build(&self, decay: f64) -> Lion {
        BurnLionConfig::new()
            .with_beta_1(self.beta1 as f32)
            .with_beta_2(self.beta2 as f32)
            .with_weight_decay((self.weight_decay * decay) as f32)
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("beta1", self.beta1),
            beta("beta2", self.beta2),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of RMSProp (Tieleman and Hinton 2012), as in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RmsPropConfig {
    /// Decay of the mean square.
    pub alpha: f64,
    /// Decay of the velocity; 0 for none.
    pub momentum: f64,
    /// Added to the root of the mean square.
    pub epsilon: f64,
    /// Whether the square of the mean is subtracted from the mean square.
    pub centered: bool,
    /// Times the parameter, added to the gradient.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for RmsPropConfig {
    fn default() -> Self {
        Self {
            alpha: 0.99,
            momentum: 0.0,
            epsilon: 1e-8,
            centered: false,
            weight_decay: 0.0,
            groups: vec![],
        }
    }
}

impl RuleConfig for RmsPropConfig {
    type Rule = RmsProp;

    fn build(&self, decay: f64) -> RmsProp {
        BurnRmsPropConfig::new()
            .with_alpha(self.alpha as f32)
            .with_momentum(self.momentum as f32)
            .with_epsilon(self.epsilon as f32)
            .with_centered(self.centered)
            .with_weight_decay(penalty(self.weight_decay * decay))
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            beta("alpha", self.alpha),
            beta("momentum", self.momentum),
            above_zero("epsilon", self.epsilon),
            weight_decay(self.weight_decay),
        ]
    }
}

/// Settings of Adagrad (Duchi et al. 2011), as in PyTorch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdagradConfig {
    /// The rate of step `t`, counted from 1, is divided by `1 + (t - 1) lr_decay`.
    pub lr_decay: f64,
    /// Added to the root of the sum of squares.
    pub epsilon: f64,
    /// Times the parameter, added to the gradient.
    pub weight_decay: f64,
    /// Parameters with another weight decay or learning rate.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ParameterGroup>,
}

impl Default for AdagradConfig {
    fn default() -> Self {
        Self {
            lr_decay: 0.0,
            epsilon: 1e-10,
            weight_decay: 0.0,
            groups: vec![],
        }
    }
}

impl RuleConfig for AdagradConfig {
    type Rule = AdaGrad;

    fn build(&self, decay: f64) -> AdaGrad {
        BurnAdaGradConfig::new()
            .with_lr_decay(self.lr_decay)
            .with_epsilon(self.epsilon as f32)
            .with_weight_decay(penalty(self.weight_decay * decay))
            .build()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![
            factor("lr_decay", self.lr_decay),
            above_zero("epsilon", self.epsilon),
            weight_decay(self.weight_decay),
        ]
    }
}
