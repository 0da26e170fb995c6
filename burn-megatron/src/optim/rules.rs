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
use super::setting::{self, Setting, above_zero, beta, factor};

/// Settings of one of Burn's element-wise optimizers.
pub(super) trait RuleConfig {
    /// The optimizer.
    type Rule: Optimizer;

    /// Builds the optimizer for parameters whose weight decay is multiplied by `decay`.
    fn build(&self, decay: f64) -> Self::Rule;
}

/// The epsilon of Burn's AdamW if the setting is 0: the square root of the smallest normal f32, which is below
/// the root of every normal second moment. Without gradients the step is then 0 instead of NaN.
const MIN_EPSILON: f32 = 1.084_202_2e-19;

/// Returns the weight decay that is added to the gradient.
fn penalty(weight_decay: f64) -> Option<WeightDecayConfig> {
    (weight_decay != 0.0).then(|| WeightDecayConfig::new(weight_decay as f32))
}

/// Declares the settings of an optimizer: the default of each setting, and the check of each number.
macro_rules! rule_config {
    (
        $(#[$doc:meta])* $config:ident {
            $($(#[$setting_doc:meta])* $setting:ident: $type:ty = $default:expr $(=> $check:ident)?,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields, default)]
        pub struct $config {
            $($(#[$setting_doc])* pub $setting: $type,)*
            /// Parameter groups with another weight decay or learning rate, selected by path patterns.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub groups: Vec<ParameterGroup>,
        }

        impl Default for $config {
            fn default() -> Self {
                Self { $($setting: $default,)* groups: vec![] }
            }
        }

        impl $config {
            /// Returns the settings, to be checked.
            pub(super) fn settings(&self) -> Vec<Setting> {
                vec![$($($check(stringify!($setting), self.$setting),)?)*]
            }
        }
    };
}

rule_config! {
    /// Settings of stochastic gradient descent: `v = momentum v + (1 - dampening) g`, `p = p - lr v`, with `v = g` in the
    /// first step.
    SgdConfig {
        /// The decay of the velocity; 0 disables momentum.
        momentum: f64 = 0.9 => beta,
        /// The dampening of the gradient: the velocity adds `1 - dampening` times the gradient.
        dampening: f64 = 0.0 => beta,
        /// Whether to use Nesterov momentum: the step is `g + momentum v`.
        nesterov: bool = false,
        /// The weight decay: this factor times the parameter is added to the gradient.
        weight_decay: f64 = 0.0 => factor,
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
}

rule_config! {
    /// Settings of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101).
    AdamWConfig {
        /// The decay of the first moment.
        beta1: f64 = 0.9 => beta,
        /// The decay of the second moment.
        beta2: f64 = 0.95 => beta,
        /// The value added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// The decoupled weight decay. It is 0 for [norms and biases](crate::nn::ParameterEntry::decay), unless
        /// a group sets it.
        weight_decay: f64 = 0.1 => factor,
    }
}

impl AdamWConfig {
    /// Checks the groups and the settings, rounded to f32 as in the computation of the moments.
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
}

rule_config! {
    /// Settings of Adam (Kingma and Ba 2015, arXiv:1412.6980), with the weight decay added to the gradient.
    AdamConfig {
        /// The decay of the first moment.
        beta1: f64 = 0.9 => beta,
        /// The decay of the second moment.
        beta2: f64 = 0.999 => beta,
        /// The value added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// Whether to use the maximum of the second moments so far (AMSGrad, Reddi et al. 2018).
        amsgrad: bool = false,
        /// The weight decay: this factor times the parameter is added to the gradient.
        weight_decay: f64 = 0.0 => factor,
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
}

rule_config! {
    /// Settings of Adan (Xie et al. 2022, arXiv:2208.06677). Each beta is `1 - beta` in the notation of the
    /// paper.
    AdanConfig {
        /// The decay of the mean gradient.
        beta1: f64 = 0.98 => beta,
        /// The decay of the mean difference of two gradients.
        beta2: f64 = 0.92 => beta,
        /// The decay of the second moment.
        beta3: f64 = 0.99 => beta,
        /// The value added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// The decoupled weight decay `w`: the parameter is divided by `1 + lr w`.
        weight_decay: f64 = 0.02 => factor,
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
}

rule_config! {
    /// Settings of Lion (Chen et al. 2023, arXiv:2302.06675). The step is the sign of `beta1 m + (1 - beta1)
    /// g`.
    LionConfig {
        /// The decay of the momentum in the step.
        beta1: f64 = 0.9 => beta,
        /// The decay of the stored momentum.
        beta2: f64 = 0.99 => beta,
        /// The decoupled weight decay.
        weight_decay: f64 = 0.1 => factor,
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
}

rule_config! {
    /// Settings of RMSProp (Tieleman and Hinton 2012), as in PyTorch.
    RmsPropConfig {
        /// The decay of the mean square.
        alpha: f64 = 0.99 => beta,
        /// The decay of the velocity; 0 disables momentum.
        momentum: f64 = 0.0 => beta,
        /// The value added to the square root of the mean square.
        epsilon: f64 = 1e-8 => above_zero,
        /// Whether the square of the mean is subtracted from the mean square.
        centered: bool = false,
        /// The weight decay: this factor times the parameter is added to the gradient.
        weight_decay: f64 = 0.0 => factor,
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
}

rule_config! {
    /// Settings of Adagrad (Duchi et al. 2011), as in PyTorch.
    AdagradConfig {
        /// The decay of the learning rate: the rate of step `t`, counted from 1, is divided by `1 + (t - 1)
        /// lr_decay`.
        lr_decay: f64 = 0.0 => factor,
        /// The value added to the square root of the sum of squares.
        epsilon: f64 = 1e-10 => above_zero,
        /// The weight decay: this factor times the parameter is added to the gradient.
        weight_decay: f64 = 0.0 => factor,
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
}
