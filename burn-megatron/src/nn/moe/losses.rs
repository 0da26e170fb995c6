//! Auxiliary losses of a router, which balance the load of the experts.
//!
//! Let `s [T, E]` be the scores of `T` real tokens for `E` experts. The scores are a softmax over all experts, or
//! sigmoids divided by their sum. Let `c_e` be the number of tokens that choose expert `e`, where each token chooses
//! `k` experts. A load balancing loss is `coefficient * E / (k T^2) * sum over e of (sum over t of s_te) c_e`. The loss
//! equals the coefficient if the load is even.
//!
//! A training step minimizes the sum of the losses of all tokens, divided by `N`. `N` is the number of tokens in the
//! global batch that count in the loss. A router loss `F` of a micro-batch with `N_mb` such tokens is added to this sum
//! as `N_mb F`. The objective therefore contains the mean of `F` over the micro-batches, weighted by `N_mb`. This mean
//! does not depend on the sizes of the mesh axes. It depends on the size of a micro-batch, unless all tokens have the
//! same routing.

use burn::tensor::{Tensor, TensorData};
use burn_megatron_kernels::moe::router::top_k_router;
use burn_megatron_kernels::moe::statistics::{count_experts, sum_scores, sum_squared_lse};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::loss_kind::RouterLossKind;
use super::routed_tokens::RankTokens;
use super::router::{RouterConfig, Routing};
use super::step::{GlobalLoad, RouterPass, RouterStep};
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::{CommError, ParallelContext, ReduceOp};
use crate::mesh::{Axis, AxisSet, Grid};
use crate::nn::forward_context::constant;
use crate::nn::unsaved::identity;

/// An auxiliary loss of a router, which is added to the loss of the model.
///
/// A load balancing loss counts each token for the experts that have the highest scores for this token. Expert groups
/// and an [`ExpertBias`](super::ExpertBias) do not affect these counts. Tokens that exceed the
/// [capacity](super::Capacity) of an expert are counted too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RouterLoss {
    /// The kind of loss.
    pub kind: RouterLossKind,
    /// The coefficient of the loss. A load balancing loss equals the coefficient if the load is even. The z-loss is
    /// multiplied by the coefficient.
    pub coefficient: f64,
}

/// The losses of one router.
#[derive(Debug)]
pub(super) struct LayerLosses {
    losses: Vec<RouterLoss>,
    layer: String,
    config: RouterConfig,
    /// The ranks with parts of the same sequences.
    sequence: Comm,
    /// The ranks with other tokens, in the same stage.
    all: Comm,
}

impl LayerLosses {
    /// Creates the losses of a router. This call is collective: make it on all ranks of the pipeline stage.
    pub fn new(
        losses: &[RouterLoss],
        config: &RouterConfig,
        layer: &str,
        groups: &ParallelContext,
    ) -> Result<Self, CommError> {
        let sequence = AxisSet::from([Axis::Tensor, Axis::Context]);
        Ok(Self {
            losses: losses.to_vec(),
            layer: layer.into(),
            config: config.clone(),
            sequence: groups.group(Grid::Dense, sequence)?,
            all: groups.group(Grid::Dense, sequence.with(Axis::Data))?,
        })
    }

    pub fn check(losses: &[RouterLoss]) -> Result<(), String> {
        let invalid = losses.iter().find(|loss| !loss.coefficient.is_finite());
        if let Some(RouterLoss { kind, coefficient }) = invalid {
            return Err(format!(
                "invalid coefficient = {coefficient} of {kind:?}: expected a finite number"
            ));
        }
        let mut kinds: Vec<_> = losses.iter().map(|loss| loss.kind).collect();
        kinds.sort_unstable();
        match kinds.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!("duplicate {:?}: expected each loss once", pair[0])),
            None => Ok(()),
        }
    }

    /// Returns the sum of the losses `[1]` for the routing of this rank's tokens, to be [attached](attach), and reports
    /// the losses. Returns `None` in the first pass of a recomputed block.
    ///
    /// This call is collective over the tensor, context and data axes.
    pub fn sum(
        &self,
        routing: &Routing,
        own: &RankTokens,
        (step, pass): (&RouterStep, RouterPass),
    ) -> Option<Tensor<1>> {
        if self.losses.is_empty() {
            return None;
        }
        let load = Load::new(self, routing, own);
        let parts = self.losses.iter().map(|loss| {
            let RouterLoss { kind, coefficient } = *loss;
            let value = self.loss(kind, &load, (step, pass));
            let value = value.mul_scalar(coefficient);
            if pass.reports() {
                step.record_loss(&self.layer, kind, value.clone().inner());
            }
            value
        });
        let sum = parts.reduce(|sum, part| sum + part);
        sum.filter(|_| pass != RouterPass::First)
    }

    /// Returns this rank's part of `N_mb F / coefficient`, `[1]`. No data is read from the device.
    fn loss(
        &self,
        kind: RouterLossKind,
        load: &Load,
        (step, pass): (&RouterStep, RouterPass),
    ) -> Tensor<1> {
        let (k, experts) = (self.config.experts_per_token as f64, self.config.experts);
        let (counted, tokens) = (step.counted(), load.own.total());
        match kind {
            RouterLossKind::Balance => {
                let tokens = tokens.max(1.0);
                let factor = counted * experts as f64 / (k * tokens * tokens);
                let counts = load.counts.clone().sum_dim(0);
                load.weighted(counts.mul_scalar(factor))
            }
            RouterLossKind::SequenceBalance => {
                let lengths = &load.own.of_sequences;
                let sequences = lengths.iter().filter(|length| **length > 0).count().max(1);
                let factor = |length: usize| {
                    let length = length.max(1) as f64;
                    counted * experts as f64 / (k * length * length * sequences as f64)
                };
                let counts = load.counts.clone();
                load.weighted(if lengths.windows(2).all(|pair| pair[0] == pair[1]) {
                    counts.mul_scalar(factor(lengths[0]))
                } else {
                    let factors = lengths.iter().map(|length| factor(*length));
                    let factors = TensorData::new(factors.collect(), [lengths.len(), 1]);
                    let options = (&counts.device(), counts.dtype());
                    counts * Tensor::from_data(factors, options)
                })
            }
            RouterLossKind::GlobalBalance => {
                let now = || {
                    // Each rank of the sequence group has the counts and tokens of the complete sequences.
                    let ranks = self.sequence.size() as f64;
                    let counts = load.counts.clone().sum_dim(0).reshape([experts]);
                    let options = (&counts.device(), counts.dtype());
                    let sizes =
                        Tensor::from_data(TensorData::new(vec![tokens, counted], [2]), options);
                    let own = Tensor::cat(vec![counts, sizes], 0).div_scalar(ranks);
                    sum_over(own, &self.all)
                };
                let GlobalLoad { now, so_far } = step.global_load(&self.layer, pass, now);
                let [tokens, counted] = [0, 1].map(|at| now.clone().narrow(0, experts + at, 1));
                let tokens_so_far = so_far.clone().narrow(0, experts, 1);
                // All ranks may have only padding.
                let [tokens, tokens_so_far] = match load.own.is_real() {
                    None => [tokens, tokens_so_far],
                    Some(_) => [tokens, tokens_so_far].map(|tokens| tokens.clamp_min(1.0)),
                };
                let factor = counted.mul_scalar(experts as f64 / k) / (tokens * tokens_so_far);
                load.weighted((so_far.narrow(0, 0, experts) * factor).unsqueeze())
            }
            RouterLossKind::ZLoss => {
                let squares = sum_squared_lse(load.logits.clone(), load.own.mask());
                squares.mul_scalar(counted / tokens.max(1.0))
            }
        }
    }
}

/// The scores and choices of a micro-batch.
struct Load {
    logits: Tensor<2>,
    /// The sums of the scores of this rank's tokens, by sequence: `[sequences, experts]`.
    scores: Tensor<2>,
    /// The number of tokens of all ranks that chose each expert, by sequence: `[sequences, experts]`, without
    /// autodiff.
    counts: Tensor<2>,
    own: RankTokens,
}

impl Load {
    fn new(layer: &LayerLosses, routing: &Routing, own: &RankTokens) -> Self {
        let (experts, sequences) = (layer.config.experts, own.of_sequences.len());
        let mut options = layer.config.options();
        let logits = routing.logits.clone();
        options.groups = None;
        let choices = if layer.config.chooses_by_scores_alone() {
            routing.indices.clone()
        } else {
            own.choices(top_k_router(logits.clone().inner(), &options, None).0)
        };
        let counts = count_experts(choices, experts, sequences).float();
        let counts = counts.cast(logits.dtype());
        Self {
            scores: sum_scores(logits.clone(), options.score, sequences, own.mask()),
            logits,
            counts: sum_over(counts, &layer.sequence),
            own: own.clone(),
        }
    }

    /// Returns the sum of the scores of this rank's tokens times `factors`, `[1, experts]` or `[sequences, experts]`.
    fn weighted(&self, factors: Tensor<2>) -> Tensor<1> {
        (self.scores.clone() * constant(factors)).sum()
    }
}

fn sum_over<const D: usize>(values: Tensor<D>, comm: &Comm) -> Tensor<D> {
    start(values, &CollectiveOp::AllReduce(ReduceOp::Sum), comm).wait()
}

/// Returns `y`. The backward pass of the result also passes a gradient to `loss`, as if `loss` were a term of the model
/// loss.
pub(super) fn attach(y: Tensor<3>, loss: Tensor<1>, step: &RouterStep) -> Tensor<3> {
    let (loss_scale, one) = (step.loss_scale().clone(), loss.ones_like().inner());
    let inputs = vec![y.into_dispatch(), loss.into_dispatch()];
    identity("AttachLoss", inputs, move |gradient| {
        let of_loss = loss_scale.scale(one.clone());
        vec![Some(gradient), Some(of_loss.into_dispatch())]
    })
}
