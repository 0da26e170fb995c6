//! The router: which experts a token goes to, and with which weights.

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::moe::router::{self as kernels, router_weights, top_k_router};
use serde::{Deserialize, Serialize};

use crate::mesh::Axis;
use crate::nn::{BuildError, Init, ModelBuilder, ParameterSpec, anchored_value};

/// How the scores of a token become the weights of its experts. `z` are its logits, `S` the experts that it chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScoreFunction {
    /// Softmax of `z` over `S` (Mixtral, Qwen 3, gpt-oss).
    Softmax,
    /// Softmax of `z` over all experts, not normalised again over `S` (OLMoE, Qwen 2, DeepSeek-V2).
    PreSoftmax,
    /// `sigmoid(z)`, divided by its sum over `S` (DeepSeek-V3).
    Sigmoid,
    /// `sqrt(ln(1 + e^z))`, divided by its sum over `S`.
    SqrtSoftplus,
}

/// The score of a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupScore {
    /// The largest score of its experts (DeepSeek-V2).
    Max,
    /// The sum of this many of its largest scores: 2 in DeepSeek-V3, `k / chosen` in Megatron.
    SumOf(usize),
}

/// Limits the choice to the best groups of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertGroups {
    /// The number of groups, of consecutive experts.
    pub groups: usize,
    /// The groups that a token chooses its experts from.
    pub chosen: usize,
    /// The score by which groups are chosen.
    pub score: GroupScore,
}

/// The type in which a router computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterDType {
    /// f32, or f64 if the tokens are in f64.
    F32,
    /// f64, which GPUs may not have.
    F64,
}

/// Configuration of a [`Router`].
#[derive(Config, Debug)]
pub struct RouterConfig {
    /// Features of a token.
    pub hidden: usize,
    /// The number of experts.
    pub experts: usize,
    /// The number of experts that each token chooses, `k`.
    pub experts_per_token: usize,
    /// How scores become weights. With `k = 1` they are not normalised over the chosen expert, which would
    /// leave the router without a gradient.
    #[config(default = "ScoreFunction::Softmax")]
    pub score: ScoreFunction,
    /// By which the weights are multiplied.
    #[config(default = 1.0)]
    pub factor: f64,
    /// Limits the choice to groups of experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the gate has a bias, as in gpt-oss.
    #[config(default = false)]
    pub bias: bool,
    /// The type in which it computes.
    #[config(default = "RouterDType::F32")]
    pub dtype: RouterDType,
    /// Initial values of the gate's weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
}

/// Chooses the experts of each token by the largest scores; of equal ones the expert with the smaller index.
///
/// Every rank has the whole gate. Under sequence parallelism each rank routes its part of the sequence, so the
/// gradient is summed over the tensor axis.
#[derive(Module, Debug)]
pub struct Router {
    /// `[hidden, experts]`
    pub gate: Param<Tensor<2>>,
    /// `[experts]`; initially 0.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    config: RouterConfig,
}

/// The routing of `[tokens, hidden]`.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[tokens, experts]`, in the type of the router.
    pub logits: Tensor<2>,
    /// The experts of each token, best first: `[tokens, k]`, without autodiff. -1 for an expert that
    /// [dropped](super::Capacity) the token.
    pub indices: Tensor<2, Int>,
    /// Their weights, in the type of the router: `[tokens, k]`.
    pub weights: Tensor<2>,
    /// The rows that each expert gets from this rank, rows of zeros after those of its tokens; by default only
    /// those of its tokens.
    pub rows_per_expert: Option<usize>,
}

impl RouterConfig {
    /// Builds the router, replicated on every rank.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for sizes that do not fit each other.
    pub fn init(&self, builder: &ModelBuilder) -> Result<Router, BuildError> {
        self.check().map_err(|message| builder.error(message))?;
        let tensor = builder.sequence_parallel().then_some(Axis::Tensor);
        let gate = ParameterSpec::new([self.hidden, self.experts], self.init).with_sum_over(tensor);
        let bias = ParameterSpec::new([self.experts], Init::Constant(0.0)).with_sum_over(tensor);
        Ok(Router {
            gate: builder.parameter("gate", gate),
            bias: self.bias.then(|| builder.parameter("bias", bias)),
            config: self.clone(),
        })
    }

    /// The options of the operation.
    pub(super) fn options(&self) -> kernels::RouterOptions {
        // A softmax over one expert would be 1.
        let score = match (self.score, self.experts_per_token) {
            (ScoreFunction::Softmax, 1) => ScoreFunction::PreSoftmax,
            (score, _) => score,
        };
        kernels::RouterOptions {
            top_k: self.experts_per_token,
            score: score.into(),
            scaling_factor: self.factor,
            groups: self.groups.map(Into::into),
        }
    }

    /// Checks the sizes against each other.
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
        let options = self.options().check(experts);
        options.map_err(|error| error.to_string())
    }
}

impl Router {
    /// Routes `[tokens, hidden]`, or with `replayed` choices `[tokens, k]`: their weights and gradients are those
    /// of the present logits.
    pub fn forward(&self, x: Tensor<2>, replayed: Option<Tensor<2, Int>>) -> Routing {
        let logits = self.logits(x);
        let options = self.config.options();
        let (indices, weights) = match replayed {
            Some(indices) => {
                let indices = plain_ints(indices);
                let weights = router_weights(logits.clone(), indices.clone(), &options);
                (indices, weights)
            }
            None => top_k_router(logits.clone(), &options, None),
        };
        Routing {
            logits,
            indices,
            weights,
            rows_per_expert: None,
        }
    }

    fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let dtype = match self.config.dtype {
            RouterDType::F32 => super::wide(x.dtype()),
            RouterDType::F64 => FloatDType::F64,
        };
        let gate = anchored_value(&self.gate, &x).cast(dtype);
        let bias = self.bias.as_ref().map(|bias| anchored_value(bias, &x));
        let logits = x.cast(dtype).matmul(gate);
        match bias {
            Some(bias) => logits + bias.cast(dtype).unsqueeze(),
            None => logits,
        }
    }

    /// The configuration.
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

/// The integers of a tensor, row by row.
pub(super) fn read(values: Tensor<2, Int>) -> Vec<i64> {
    let values = values.into_data().convert_dtype(DType::I64);
    match values.try_into_vec() {
        Ok(values) => values,
        Err(error) => unreachable!("converted to integers: {error}"),
    }
}

/// Without autodiff.
pub(super) fn plain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    if x.is_autodiff() { x.inner() } else { x }
}

fn plain_ints(x: Tensor<2, Int>) -> Tensor<2, Int> {
    if x.is_autodiff() { x.inner() } else { x }
}

/// f32, or f64 for f64.
pub(super) fn wide(dtype: DType) -> FloatDType {
    match dtype {
        DType::F64 => FloatDType::F64,
        _ => FloatDType::F32,
    }
}
