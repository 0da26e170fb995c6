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
            /// Parameter groups, which set another weight decay or learning rate for the parameters whose paths match a
            /// pattern.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub groups: Vec<ParameterGroup>,
        }

        impl Default for $config {
            fn default() -> Self {
                Self { $($setting: $default,)* groups: vec![] }
            }
        }

        impl $config {
            /// Returns the settings that must be checked.
            pub(super) fn settings(&self) -> Vec<Setting> {
                vec![$($($check(stringify!($setting), self.$setting),)?)*]
            }
        }
    };
}

rule_config! {
    /// Settings of stochastic gradient descent (SGD). A step computes `v = momentum v + (1 - dampening) g` and
    /// `p = p - lr v`. In the first step `v = g`.
    SgdConfig {
        /// The momentum factor, which is the decay factor of the velocity. 0 disables momentum.
        momentum: f64 = 0.9 => beta,
        /// The dampening of the gradient: `1 - dampening` times the gradient is added to the velocity.
        dampening: f64 = 0.0 => beta,
        /// Whether to use Nesterov momentum, in which the update is `g + momentum v` instead of `v`.
        nesterov: bool = false,
        /// The weight decay (L2 regularization): the parameter times this factor is added to the gradient.
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
        /// The decay factor of the first moment.
        beta1: f64 = 0.9 => beta,
        /// The decay factor of the second moment.
        beta2: f64 = 0.95 => beta,
        /// The value that is added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// The decoupled weight decay. It is 0 for [norms and biases](crate::nn::ParameterEntry::decay), unless a
        /// parameter group sets it.
        weight_decay: f64 = 0.1 => factor,
    }
}

impl AdamWConfig {
    /// Checks the parameter groups and the settings. The settings are rounded to f32 before the check, because the
    /// moments are computed with the rounded values.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] for the first setting that is out of its range, [`OptimizerError::Group`] for the
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
    /// Settings of Adam (Kingma and Ba 2015, arXiv:1412.6980). The weight decay is added to the gradient.
    AdamConfig {
        /// The decay factor of the first moment.
        beta1: f64 = 0.9 => beta,
        /// The decay factor of the second moment.
        beta2: f64 = 0.999 => beta,
        /// The value that is added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// Whether to use the maximum of all second moments so far instead of the current second moment (AMSGrad, Reddi
        /// et al. 2018).
        amsgrad: bool = false,
        /// The weight decay (L2 regularization): the parameter times this factor is added to the gradient.
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
    /// Settings of Adan (Xie et al. 2022, arXiv:2208.06677). The value of each beta is `1 - beta` in the notation of
    /// the paper.
    AdanConfig {
        /// The decay factor of the mean gradient.
        beta1: f64 = 0.98 => beta,
        /// The decay factor of the mean difference of consecutive gradients.
        beta2: f64 = 0.92 => beta,
        /// The decay factor of the second moment.
        beta3: f64 = 0.99 => beta,
        /// The value that is added to the square root of the second moment.
        epsilon: f64 = 1e-8 => above_zero,
        /// The decoupled weight decay `w`. In each step the parameter is divided by `1 + lr w`.
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
    /// Settings of Lion (Chen et al. 2023, arXiv:2302.06675). The update is the sign of `beta1 m + (1 - beta1) g`.
    LionConfig {
        /// The weight of the momentum in the update.
        beta1: f64 = 0.9 => beta,
        /// The decay factor of the stored momentum.
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
    /// Settings of RMSProp (Tieleman and Hinton 2012). The settings have the same meaning as in PyTorch.
    RmsPropConfig {
        /// The decay factor of the mean square.
        alpha: f64 = 0.99 => beta,
        /// The momentum factor, which is the decay factor of the velocity. 0 disables momentum.
        momentum: f64 = 0.0 => beta,
        /// The value that is added to the square root of the mean square.
        epsilon: f64 = 1e-8 => above_zero,
        /// Whether the squared mean of the gradient is subtracted from the mean square (centered RMSProp).
        centered: bool = false,
        /// The weight decay (L2 regularization): the parameter times this factor is added to the gradient.
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
    /// Settings of Adagrad (Duchi et al. 2011). The settings have the same meaning as in PyTorch.
    AdagradConfig {
        /// The learning rate decay: in step `t`, counted from 1, the learning rate is divided by
        /// `1 + (t - 1) lr_decay`.
        lr_decay: f64 = 0.0 => factor,
        /// The value that is added to the square root of the sum of squares.
        epsilon: f64 = 1e-10 => above_zero,
        /// The weight decay (L2 regularization): the parameter times this factor is added to the gradient.
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
