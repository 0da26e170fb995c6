//! The element-wise optimizers of Burn: their settings, and their states as flat tensors.

use std::collections::BTreeMap;

use burn::optim::decay::WeightDecayConfig;
use burn::optim::momentum::{MomentumConfig, MomentumState};
use burn::optim::{
    AdaGrad, AdaGradConfig as BurnAdaGradConfig, AdaGradState, Adam, AdamConfig as BurnAdamConfig,
    AdamState, Adan, AdanConfig as BurnAdanConfig, AdanState, AdaptiveMomentumState,
    AdaptiveNesterovMomentumState, CenteredState, Lion, LionConfig as BurnLionConfig, LionState,
    LrDecayState, Optimizer, RmsProp, RmsPropConfig as BurnRmsPropConfig, RmsPropMomentumState,
    RmsPropState, Sgd, SgdConfig as BurnSgdConfig, SgdState, SquareAvgState,
};
use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::config::{Setting, above_zero, beta, factor, weight_decay};
use super::groups::ParameterGroup;

/// The tensors of an optimizer's state on a shard, by their names in Burn's record of the state.
pub type StateTensors = BTreeMap<String, Tensor<1>>;

/// An element-wise optimizer whose state a checkpoint can restore in any layout: its tensors have an element for each
/// of the parameter, and everything else in it follows from the number of steps.
pub trait ResumableOptimizer: Optimizer {
    /// The name of the optimizer, which begins the keys of its state.
    const NAME: &'static str;

    /// Tensors of its record that are not saved, as the next step does not read them.
    const UNSAVED: &'static [&'static str] = &[];

    /// The state after `steps` steps, from the tensors that were saved. `None` if one is missing.
    fn restored(steps: usize, tensors: StateTensors) -> Option<Self::State<1>>;
}

/// Settings of one of Burn's element-wise optimizers.
pub(super) trait RuleConfig {
    /// The optimizer.
    type Rule: ResumableOptimizer;

    /// The optimizer for parameters whose weight decay is multiplied by `decay`.
    fn build(&self, decay: f64) -> Self::Rule;

    /// The settings, to be checked.
    fn settings(&self) -> Vec<Setting>;

    /// The parameter groups.
    fn groups(&self) -> &[ParameterGroup];
}

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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for Sgd {
    const NAME: &'static str = "sgd";

    fn restored(_: usize, mut tensors: StateTensors) -> Option<SgdState<1>> {
        let velocity = tensors.remove("momentum.velocity");
        Some(SgdState::new(velocity.map(MomentumState::new)))
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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for Adam {
    const NAME: &'static str = "adam";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdamState<1>> {
        let [first, second] = ["momentum.moment_1", "momentum.moment_2"];
        let (first, second) = (tensors.remove(first)?, tensors.remove(second)?);
        let momentum = AdaptiveMomentumState {
            max_moment_2: tensors.remove("momentum.max_moment_2"),
            ..AdaptiveMomentumState::new(steps, first, second)
        };
        Some(AdamState::new(momentum))
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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for Adan {
    const NAME: &'static str = "adan";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdanState<1>> {
        let mut take = |name: &str| tensors.remove(&format!("momentum.{name}"));
        Some(AdanState::new(AdaptiveNesterovMomentumState::new(
            steps,
            take("exp_avg")?,
            take("exp_avg_sq")?,
            take("exp_avg_diff")?,
            take("neg_pre_grad")?,
        )))
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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for Lion {
    const NAME: &'static str = "lion";

    fn restored(_: usize, mut tensors: StateTensors) -> Option<LionState<1>> {
        tensors.remove("momentum").map(LionState::new)
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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for RmsProp {
    const NAME: &'static str = "rmsprop";

    /// It is computed anew from the other two.
    const UNSAVED: &'static [&'static str] = &["centered.avg"];

    fn restored(_: usize, mut tensors: StateTensors) -> Option<RmsPropState<1>> {
        let squares = tensors.remove("square_avg.square_avg")?;
        let mean = tensors.remove("centered.grad_avg");
        let velocity = tensors.remove("momentum.buf");
        Some(RmsPropState::new(
            SquareAvgState::new(squares.clone()),
            CenteredState::new(mean, squares),
            velocity.map(RmsPropMomentumState::new),
        ))
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

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }
}

impl ResumableOptimizer for AdaGrad {
    const NAME: &'static str = "adagrad";

    fn restored(steps: usize, mut tensors: StateTensors) -> Option<AdaGradState<1>> {
        let sum = tensors.remove("lr_decay.sum")?;
        Some(AdaGradState::new(LrDecayState::new(steps, sum)))
    }
}
