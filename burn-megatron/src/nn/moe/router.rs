//! The router, which selects the experts of each token and computes the weights of these experts.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_megatron_kernels::moe::router::{self as kernels, router_weights, top_k_router};
use burn_megatron_kernels::{gemm, record};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::bias::ExpertBias;
use super::choice::{RouterChoice, TokenPosition, round_robin, sinkhorn_choices};
use super::routed_tokens::{RankTokens, RoutedTokens};
use crate::collective::Comm;
use crate::mesh::{Axis, AxisSet, Grid};
use crate::nn::forward_context::{constant, is_training};
use crate::nn::wide::wide;
use crate::nn::{AxisRank, BuildError, Init, ModelBuilder, ParameterSpec, anchored_value};

/// The function that computes the weights of the chosen experts of a token from its logits. Below, `z` are the logits
/// of the token, and `S` is the set of its chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScoreFunction {
    /// Softmax of `z` over `S` (Mixtral, Qwen 3, gpt-oss).
    Softmax,
    /// Softmax of `z` over all experts, not normalized again over `S` (OLMoE, Qwen 2, DeepSeek-V2).
    PreSoftmax,
    /// `sigmoid(z)`, divided by its sum over `S` (DeepSeek-V3).
    Sigmoid,
    /// `sqrt(ln(1 + e^z))`, divided by its sum over `S`.
    SqrtSoftplus,
}

/// The method of computing the score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScore {
    /// The largest score of the experts in the group (DeepSeek-V2).
    Max,
    /// The sum of the `n` largest scores of the experts in the group, for a given `n`. DeepSeek-V3 uses 2, and Megatron
    /// uses `k / chosen`.
    SumOf(usize),
}

/// Settings of group-limited routing: a token chooses its experts only from the groups of experts with the highest
/// group scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// The number of groups. Each group consists of consecutive experts.
    pub groups: usize,
    /// The number of groups from which a token chooses its experts.
    pub chosen: usize,
    /// The method of computing the score of a group.
    pub score: GroupScore,
}

/// The dtype in which a router computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RouterDType {
    /// f32, or f64 if the tokens are in f64.
    F32,
    /// f64. Some GPUs do not support f64.
    F64,
}

/// Configuration of a [`Router`].
#[derive(Config, Debug)]
pub struct RouterConfig {
    /// The hidden size: the number of features per token.
    pub hidden: usize,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that each token chooses, `k`.
    pub experts_per_token: usize,
    /// The score function, which computes the weights of the experts from the logits.
    #[config(default = "ScoreFunction::Softmax")]
    pub score: ScoreFunction,
    /// Whether the weights of a token are divided by their sum over the chosen experts. The default is true if a token
    /// chooses several experts, except with [`ScoreFunction::PreSoftmax`]. If a token chooses one expert, the default
    /// is false. A normalized weight would then be constant, and the router would have no gradient.
    pub normalized: Option<bool>,
    /// The scaling factor of the weights (`routed_scaling_factor` of DeepSeek-V3).
    #[config(default = 1.0)]
    pub factor: f64,
    /// The method of expert selection.
    #[config(default = "RouterChoice::Scores")]
    pub choice: RouterChoice,
    /// The settings of group-limited routing. With `None`, a token chooses from all experts.
    pub groups: Option<ExpertGroups>,
    /// The update rate of the [`ExpertBias`], such as 1e-3. With the rate 0, the bias keeps its loaded value. With
    /// `None`, the router has no expert bias.
    pub bias_update_rate: Option<f64>,
    /// The jitter of the router input in training. Each feature of a token is multiplied by a random number from the
    /// range `1 - jitter` to `1 + jitter` (Fedus et al. 2021, arXiv:2101.03961). The experts get the original features.
    /// The random numbers are drawn on the host.
    #[config(default = 0.0)]
    pub jitter: f64,
    /// Whether the gate, the linear layer that computes the logits, has a bias, as in gpt-oss.
    #[config(default = false)]
    pub bias: bool,
    /// The dtype in which the router computes.
    #[config(default = "RouterDType::F32")]
    pub dtype: RouterDType,
    /// The initializer of the weight of the gate.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
}

/// The router of an MoE layer, which selects the experts of each token. By default it selects the experts with the
/// largest scores. If two scores are equal, the expert with the smaller index is selected first.
///
/// The gate is replicated on every rank. Each tensor rank routes its part of the sequence, so the gradient of the gate
/// is summed over the tensor axis.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::moe::{RoutedTokens, RouterConfig};
/// use burn_megatron::prelude::*;
///
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let router = RouterConfig::new(8, 4, 2).init(&builder)?;
/// let x = Tensor::<3>::ones([1, 3, 8], &Device::flex());
/// let routing = router.forward(x, None, &RoutedTokens::rows([1, 3]));
/// assert_eq!(routing.indices.dims(), [3, 2]);
/// // The weights of the 2 chosen experts of a token add up to 1.
/// assert!((routing.weights.sum().into_scalar::<f32>() - 3.0).abs() < 1e-4);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct Router {
    /// The weight of the gate: `[hidden, experts]`.
    pub gate: Param<Tensor<2>>,
    /// The bias of the gate: `[experts]`, initialized to 0.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    expert_bias: Option<ExpertBias>,
    /// The ranks with parts of the same sequences.
    #[module(skip)]
    sequence: Comm,
    #[module(skip)]
    tokens: TokenPosition,
    /// The key of the random numbers of the jitter.
    #[module(skip)]
    key: u64,
    #[module(skip)]
    config: RouterConfig,
}

/// The result of routing `[tokens, hidden]`: the chosen experts of each token, and their weights.
#[derive(Clone, Debug)]
pub struct Routing {
    /// The logits `[tokens, experts]`, in the dtype of the router.
    pub logits: Tensor<2>,
    /// The indices of the experts of each token, best expert first: `[tokens, k]`, not tracked by autodiff. The index
    /// is -1 for an expert that [dropped](super::Capacity) the token, and for padding.
    pub indices: Tensor<2, Int>,
    /// The weights of the experts, in the dtype of the router: `[tokens, k]`.
    pub weights: Tensor<2>,
    /// The number of rows that each expert gets from this rank, including the zero rows that follow the rows of tokens.
    /// With `None`, an expert gets only the rows of its tokens.
    pub rows_per_expert: Option<usize>,
}

impl RouterConfig {
    /// Builds the router, which is replicated on every rank. This call is collective: make it on all ranks of the
    /// pipeline stage.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if settings conflict with each other. [`BuildError::Comm`] if the collective fails.
    pub fn init(&self, builder: &ModelBuilder) -> Result<Router, BuildError> {
        self.check().map_err(|message| builder.error(message))?;
        // Each tensor rank routes its part of the sequence.
        let tensor = (builder.place().size > 1).then_some(Axis::Tensor);
        let gate = ParameterSpec::new([self.hidden, self.experts], self.init).with_sum_over(tensor);
        let bias = ParameterSpec::new([self.experts], Init::Constant(0.0)).with_sum_over(tensor);
        let expert_bias = |rate| ExpertBias::new(self.experts, rate, builder.device());
        let sequence = AxisSet::from([Axis::Tensor, Axis::Context]);
        Ok(Router {
            gate: builder.parameter("gate", gate),
            bias: self.bias.then(|| builder.parameter("bias", bias)),
            expert_bias: self.bias_update_rate.map(expert_bias),
            sequence: builder.groups().group(Grid::Dense, sequence)?,
            tokens: TokenPosition {
                position: builder.position().clone(),
                place: builder.place(),
            },
            key: builder.stream_key(),
            config: self.clone(),
        })
    }

    /// Returns the options of the router kernels.
    pub(super) fn options(&self) -> kernels::RouterOptions {
        let normalized = self.normalized.unwrap_or(self.experts_per_token > 1);
        // A softmax over a single expert would always be 1.
        let score = match self.score {
            ScoreFunction::Softmax if !normalized => ScoreFunction::PreSoftmax,
            score => score,
        };
        kernels::RouterOptions {
            top_k: self.experts_per_token,
            score: score.into(),
            normalized: self.normalized,
            scaling_factor: self.factor,
            groups: self.groups.map(Into::into),
        }
    }

    /// Checks that the settings are consistent.
    pub(super) fn check(&self) -> Result<(), String> {
        let (experts, k) = (self.experts, self.experts_per_token);
        if !(1..=experts).contains(&k) {
            return Err(format!(
                "invalid experts_per_token = {k}: expected 1 to the {experts} experts"
            ));
        }
        if !(self.factor.is_finite() && self.factor > 0.0) {
            return Err(format!(
                "invalid factor = {} of the weights: expected a positive finite number",
                self.factor
            ));
        }
        let conflict = match (self.score, self.normalized) {
            (ScoreFunction::PreSoftmax, Some(true)) => Some(("pre-softmax", "softmax")),
            (ScoreFunction::Softmax, Some(false)) if k > 1 => Some(("softmax", "pre-softmax")),
            _ => None,
        };
        if let (Some((score, other)), Some(normalized)) = (conflict, self.normalized) {
            return Err(format!(
                "normalized = {normalized} conflicts with score = {score}: remove normalized or set score = {other}"
            ));
        }
        if let Some(rate) = self.bias_update_rate
            && !(rate.is_finite() && rate >= 0.0)
        {
            return Err(format!(
                "invalid bias_update_rate = {rate}: expected a finite number of at least 0"
            ));
        }
        if !(0.0..1.0).contains(&self.jitter) {
            return Err(format!(
                "invalid jitter = {}: expected at least 0 and below 1",
                self.jitter
            ));
        }
        if self.choice != RouterChoice::Scores
            && (self.groups.is_some() || self.bias_update_rate.is_some())
        {
            return Err(format!(
                "groups and an expert bias conflict with {:?} choices: expected choices by scores",
                self.choice
            ));
        }
        let options = self.options().check(experts);
        options.map_err(|error| error.to_string())
    }

    /// Returns whether the experts of a token are the experts with its largest scores.
    pub(super) fn chooses_by_scores_alone(&self) -> bool {
        self.choice == RouterChoice::Scores
            && self.groups.is_none()
            && self.bias_update_rate.is_none()
    }
}

impl Router {
    /// Routes the tokens `[batch, seq, hidden]`. `tokens` describes the tokens of all tensor ranks. Each rank routes a
    /// part of these tokens. If `replayed` `[batch * seq, k]` is given, these expert choices replace the choices of the
    /// router. The weights and the gradients are still computed from the current logits.
    ///
    /// In training with [`RouterChoice::Sinkhorn`] this call is collective over the tensor and context axes.
    pub fn forward(
        &self,
        x: Tensor<3>,
        replayed: Option<Tensor<2, Int>>,
        tokens: &RoutedTokens,
    ) -> Routing {
        let [batch, seq, hidden] = x.dims();
        let is_training = is_training(&x);
        let jittered = if is_training && self.config.jitter > 0.0 {
            self.jittered(x.clone())
        } else {
            x.clone()
        };
        let own = self.own(tokens, &x);
        let logits = self.logits(jittered.reshape([batch * seq, hidden]), &x);
        let options = self.config.options();
        let (k, experts) = (self.config.experts_per_token, self.config.experts);
        let choices = match (replayed, self.config.choice) {
            (Some(choices), _) => Some(choices.inner()),
            (None, RouterChoice::Sinkhorn) if is_training => {
                let (is_real, sizes) = (own.is_real(), (batch, k));
                Some(sinkhorn_choices(
                    logits.clone(),
                    is_real,
                    sizes,
                    &self.sequence,
                ))
            }
            (None, RouterChoice::RoundRobin) if record::is_recording() => {
                Some(Tensor::zeros([batch * seq, k], &x.device()))
            }
            (None, RouterChoice::RoundRobin) => {
                let positions = tokens.positions([batch, seq], self.place());
                let choices = round_robin(positions, k, experts);
                let choices = TensorData::new(choices, [batch * seq, k]);
                Some(Tensor::from_data(choices, &x.device().inner()))
            }
            (None, RouterChoice::Scores | RouterChoice::Sinkhorn) => None,
        };
        let (indices, weights) = match choices {
            Some(indices) => {
                let weights = router_weights(logits.clone(), indices.clone(), &options);
                (indices, weights)
            }
            None => {
                let bias = self.expert_bias.as_ref().map(ExpertBias::value);
                top_k_router(logits.clone(), &options, bias)
            }
        };
        Routing {
            logits,
            indices: own.choices(indices),
            weights,
            rows_per_expert: None,
        }
    }

    /// Returns this rank's part of `tokens`: the tokens of `x` `[batch, seq, hidden]`.
    pub(super) fn own(&self, tokens: &RoutedTokens, x: &Tensor<3>) -> RankTokens {
        let [batch, seq, _] = x.dims();
        tokens.part(
            [batch, seq],
            self.place(),
            self.sequence.size(),
            &x.device(),
        )
    }

    /// Returns this rank's position among the tensor ranks.
    pub(super) fn place(&self) -> AxisRank {
        self.tokens.place
    }

    /// Returns the logits of `[tokens, hidden]`. The gradients of the gate are anchored to `anchor`.
    fn logits(&self, x: Tensor<2>, anchor: &Tensor<3>) -> Tensor<2> {
        let dtype = match self.config.dtype {
            RouterDType::F32 => wide(x.dtype()),
            RouterDType::F64 => DType::F64,
        };
        let gate = anchored_value(&self.gate, anchor).cast(dtype);
        let bias = self.bias.as_ref().map(|bias| anchored_value(bias, anchor));
        let x = x.cast(dtype);
        let logits = if is_training(anchor) {
            x.matmul(gate)
        } else {
            // On the CPU the logits of a token must not depend on the other tokens of the batch.
            gemm::linear(x, gate, None)
        };
        match bias {
            Some(bias) => logits + bias.cast(dtype).unsqueeze(),
            None => logits,
        }
    }

    fn jittered(&self, x: Tensor<3>) -> Tensor<3> {
        if record::is_recording() {
            return x.clone() * x.empty_like();
        }
        let factors = self.tokens.jitter(x.dims(), self.config.jitter, self.key);
        let factors = TensorData::new(factors, x.dims());
        let options = (&x.device().inner(), x.dtype());
        x * constant(Tensor::from_data(factors, options))
    }

    /// Returns the expert bias, or `None` if the router has no expert bias.
    pub fn expert_bias(&self) -> Option<&ExpertBias> {
        self.expert_bias.as_ref()
    }

    /// Returns the configuration.
    pub fn config(&self) -> &RouterConfig {
        &self.config
    }
}

impl From<ScoreFunction> for kernels::ScoreFunction {
    fn from(score: ScoreFunction) -> Self {
        match score {
            ScoreFunction::Softmax => Self::Softmax,
            ScoreFunction::PreSoftmax => Self::PreSoftmax,
            ScoreFunction::Sigmoid => Self::Sigmoid,
            ScoreFunction::SqrtSoftplus => Self::SqrtSoftplus,
        }
    }
}

impl From<ExpertGroups> for kernels::ExpertGroups {
    fn from(groups: ExpertGroups) -> Self {
        Self {
            groups: groups.groups,
            chosen: groups.chosen,
            score: match groups.score {
                GroupScore::Max => kernels::GroupScore::Max,
                GroupScore::SumOf(terms) => kernels::GroupScore::SumOf(terms),
            },
        }
    }
}
