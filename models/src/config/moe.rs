//! The configuration of mixture-of-experts layers.

use burn_megatron::mesh::{Axis, ParallelConfig, split_evenly};
use burn_megatron::nn::BuildError;
use burn_megatron::nn::moe::{
    Capacity, DispatcherKind, ExpertGroups, Fp8DispatchScales, GroupScore, MoeMlpConfig,
    RouterChoice, RouterConfig, RouterDType, RouterLoss, RouterLossKind, ScoreFunction,
    SharedExpertsConfig,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{TransformerConfig, refused};

/// Configuration of a mixture of experts, which replaces the MLP in some or all blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MoeConfig {
    /// The number of experts.
    #[schemars(extend("resume" = "never"))]
    pub experts: usize,
    /// The number of experts per token (top-k).
    pub experts_per_token: usize,
    /// The inner width of an expert; by default the width of the MLP.
    pub expert_width: Option<usize>,
    /// The interval between blocks with experts. With 1, all blocks after the first `first_dense` blocks have experts.
    pub every: usize,
    /// The number of blocks at the start of the model that have an MLP instead of experts.
    pub first_dense: usize,
    /// The function that converts router scores to expert weights.
    pub score: ScoreFunction,
    /// Whether the expert weights of a token are divided by their sum over the selected experts. The default is true if
    /// a token uses several experts, except with pre-softmax.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalized: Option<bool>,
    /// The scaling factor of the expert weights.
    pub factor: f64,
    /// The method that the router uses to select experts.
    pub choice: RouterChoice,
    /// Group-limited routing: the router selects experts only from the best groups. By default, it selects from all
    /// experts.
    pub groups: Option<ExpertGroups>,
    /// The update rate of the expert biases, which balance the load of the experts. By default, the router has no
    /// expert biases.
    pub bias_update_rate: Option<f64>,
    /// Router jitter: during training, router inputs are multiplied by random factors from `1 - jitter` to `1 +
    /// jitter`.
    pub jitter: f64,
    /// Whether the linear layer of the router has a bias, as in gpt-oss.
    pub router_bias: bool,
    /// The dtype in which the router computes.
    pub router_dtype: RouterDType,
    /// The inner width of the shared expert, an MLP that processes every token. By default, the model has no shared
    /// expert.
    pub shared_width: Option<usize>,
    /// Whether a learned gate scales the output of the shared expert.
    pub shared_gate: bool,
    /// The auxiliary losses of the routers.
    pub losses: Vec<RouterLoss>,
    /// Expert capacity: the maximum number of tokens per expert. By default, no tokens are dropped.
    pub capacity: Option<Capacity>,
    /// The dispatcher, which sends tokens to the ranks of their experts and returns the results.
    pub dispatcher: DispatcherKind,
    /// The kind of scales for tokens that the flex dispatcher sends in FP8. By default, tokens are sent in the dtype of
    /// the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("experimental" = true))]
    pub fp8_dispatch: Option<Fp8DispatchScales>,
}

impl Default for MoeConfig {
    /// Returns the experts of Mixtral: two of eight experts per token, in every block.
    fn default() -> Self {
        Self {
            experts: 8,
            experts_per_token: 2,
            expert_width: None,
            every: 1,
            first_dense: 0,
            score: ScoreFunction::Softmax,
            normalized: None,
            factor: 1.0,
            choice: RouterChoice::Scores,
            groups: None,
            bias_update_rate: None,
            jitter: 0.0,
            router_bias: false,
            router_dtype: RouterDType::F32,
            shared_width: None,
            shared_gate: false,
            losses: vec![],
            capacity: None,
            dispatcher: DispatcherKind::AllToAll,
            fp8_dispatch: None,
        }
    }
}

impl MoeConfig {
    /// Returns the experts of [`TransformerConfig::deepseek`], routed as in DeepSeek-V3.
    pub(crate) fn deepseek() -> Self {
        Self {
            expert_width: Some(64),
            first_dense: 1,
            score: ScoreFunction::Sigmoid,
            factor: 2.5,
            groups: Some(ExpertGroups {
                groups: 4,
                chosen: 2,
                score: GroupScore::SumOf(2),
            }),
            bias_update_rate: Some(1e-3),
            shared_width: Some(64),
            losses: vec![RouterLoss {
                kind: RouterLossKind::SequenceBalance,
                coefficient: 1e-4,
            }],
            ..Self::default()
        }
    }

    /// Returns a configuration in which every `every`-th block has experts, after `dense` blocks without experts at the
    /// start.
    pub(crate) fn in_blocks(self, every: usize, dense: usize) -> Self {
        Self {
            every,
            first_dense: dense,
            ..self
        }
    }

    /// Checks that some of `layers` blocks have experts.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if no block has experts.
    pub(crate) fn check_blocks(&self, layers: usize) -> Result<(), BuildError> {
        if self.first_dense < layers {
            return Ok(());
        }
        Err(refused(format!(
            "first_dense = {} leaves none of the {layers} blocks: expected at most {}",
            self.first_dense,
            layers.saturating_sub(1)
        )))
    }

    /// Returns whether block `number` of the model has experts.
    pub fn is_in(&self, number: usize) -> bool {
        let after = number.checked_sub(self.first_dense);
        after.is_some_and(|after| after.is_multiple_of(self.every))
    }

    /// Returns the number of blocks with experts in a model of `layers` blocks.
    pub(crate) fn blocks(&self, layers: usize) -> usize {
        (0..layers).filter(|number| self.is_in(*number)).count()
    }

    /// Returns the sizes that must be above 0.
    pub(crate) fn sizes(&self) -> [(&'static str, usize); 5] {
        [
            ("moe.experts", self.experts),
            ("moe.experts_per_token", self.experts_per_token),
            ("moe.expert_width", self.expert_width.unwrap_or(1)),
            ("moe.every", self.every),
            ("moe.shared_width", self.shared_width.unwrap_or(1)),
        ]
    }

    /// Returns whether the results depend on how a batch is divided into micro-batches: see
    /// [`ModelConfig::depends_on_micro_batches`](burn_megatron::model::ModelConfig::depends_on_micro_batches). The
    /// global load balancing loss does not depend on it, since it covers all micro-batches that the ranks compute at
    /// the same time.
    pub(crate) fn depends_on_micro_batches(&self) -> bool {
        let local = |loss: &RouterLoss| loss.kind != RouterLossKind::GlobalBalance;
        self.losses.iter().any(local)
            || self.capacity.is_some()
            || self.choice == RouterChoice::Sinkhorn
    }

    /// Returns the configuration of the expert layer of a block.
    pub(crate) fn layer(&self, model: &TransformerConfig) -> MoeMlpConfig {
        let router = RouterConfig::new(model.hidden, self.experts, self.experts_per_token)
            .with_score(self.score)
            .with_normalized(self.normalized)
            .with_factor(self.factor)
            .with_choice(self.choice)
            .with_groups(self.groups)
            .with_bias_update_rate(self.bias_update_rate)
            .with_jitter(self.jitter)
            .with_bias(self.router_bias)
            .with_dtype(self.router_dtype);
        let shared = self.shared_width.map(SharedExpertsConfig::new);
        MoeMlpConfig::new(router, self.width(model), model.activation)
            .with_bias(model.bias)
            .with_dispatcher(self.dispatcher)
            .with_fp8_dispatch(self.fp8_dispatch)
            .with_capacity(self.capacity)
            .with_losses(self.losses.clone())
            .with_shared(shared.map(|shared| shared.with_gate(self.shared_gate)))
    }

    /// Returns whether the weights of the selected experts are divided by their sum.
    pub(crate) fn is_normalized(&self) -> bool {
        let usual = self.score != ScoreFunction::PreSoftmax && self.experts_per_token > 1;
        self.normalized.unwrap_or(usual)
    }

    /// Returns the inner width of an expert.
    pub(crate) fn width(&self, model: &TransformerConfig) -> usize {
        self.expert_width.unwrap_or_else(|| model.mlp_width())
    }

    /// Checks that the layout can split the sizes of the experts. Nothing is allocated.
    pub(crate) fn check(
        &self,
        model: &TransformerConfig,
        layout: &ParallelConfig,
    ) -> Result<(), BuildError> {
        let tensor = layout.tensor;
        let checked = self.layer(model).check(layout);
        checked.map_err(|message| refused(format!("moe: {message}")))?;
        let expert_tensor = layout.expert_tensor_size();
        let width = self.width(model);
        // Each tensor-parallel rank routes its part of the sequence.
        split_evenly("context", model.context, Axis::Tensor, tensor)?;
        split_evenly("experts", self.experts, Axis::Expert, layout.expert)?;
        split_evenly("expert width", width, Axis::ExpertTensor, expert_tensor)?;
        if let Some(shared) = self.shared_width {
            split_evenly("shared expert width", shared, Axis::Tensor, tensor)?;
        }
        Ok(())
    }

    /// Returns the sum of the inner widths of all experts of a block, including the shared expert.
    pub(crate) fn columns(&self, model: &TransformerConfig) -> u128 {
        let shared = self.shared_width.unwrap_or(0) as u128;
        self.experts as u128 * self.width(model) as u128 + shared
    }
}

#[cfg(test)]
#[path = "moe_tests.rs"]
mod tests;
