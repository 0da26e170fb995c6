//! Losses that keep the load of the experts even.
//!
//! With the scores `s [T, E]` of `T` tokens for `E` experts (softmax over all experts, or sigmoids divided by their
//! sum) and the numbers `c_e` of tokens that choose expert `e`, of which each token chooses `k`, a balance loss is
//! `coefficient * E / (k T^2) * sum over e of (sum over t of s_te) c_e`: the coefficient if the load is even.
//!
//! A training step minimises the sum of the losses of all tokens, divided by the number of counted tokens `N` of the
//! global batch. A loss `F` of the tokens of a micro-batch is added there as `N_mb F`, with its counted tokens
//! `N_mb`: the objective is the mean of `F` over micro-batches, weighted by their tokens. It does not depend on
//! the sizes of the axes; it depends on the size of a micro-batch, except for tokens with the same routing.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::{Tensor, TensorData};
use burn_megatron_kernels::moe::router::top_k_router;
use burn_megatron_kernels::moe::statistics::{count_experts, sum_scores, sum_squared_lse};
use burn_megatron_kernels::{Function, apply};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::router::{RouterConfig, Routing, plain, read};
use crate::collective::Comm;
use crate::comm::{Buffer, CommError, ParallelContext, ReduceOp, raise};
use crate::mesh::{Axis, AxisSet, Grid};
use crate::nn::LossFactor;

/// A kind of [`RouterLoss`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RouterLossKind {
    /// The balance of a micro-batch.
    Balance,
    /// The balance of each sequence, averaged over those of the micro-batch (DeepSeek-V3).
    SequenceBalance,
    /// The balance of the micro-batches of all data ranks, with the mean load of those so far in the step.
    GlobalBalance,
    /// `coefficient * mean over t of (log sum over e of exp z_te)^2` (ST-MoE, arXiv:2202.08906).
    ZLoss,
}

/// A loss of a router, in addition to that of the model.
///
/// Choices are counted by their scores alone: without groups of experts, and before a
/// [capacity](super::Capacity) drops tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterLoss {
    /// The kind of loss.
    pub kind: RouterLossKind,
    /// Its value if the load is even; for the z-loss, its weight.
    pub coefficient: f64,
}

/// What routers need to add their losses to that of a micro-batch, and what they report of a step.
///
/// Made for a step on each rank, handed through the forward of the micro-batches. Without it, and in a forward that is
/// not recorded by autodiff, such as the first pass of a [recomputed](crate::nn::recompute) block, routers have no
/// losses.
#[derive(Clone, Debug)]
pub struct RouterLosses {
    step: Arc<StepOfRouters>,
    counted: f64,
}

#[derive(Debug)]
struct StepOfRouters {
    loss_scale: LossFactor,
    state: Mutex<StepState>,
}

#[derive(Debug, Default)]
struct StepState {
    /// By layer, the tokens of each expert and all tokens of the step so far.
    loads: BTreeMap<String, Vec<f64>>,
    /// By layer, this rank's part of the sum of `N_mb F` over the micro-batches so far, `[1]`.
    sums: BTreeMap<(String, RouterLossKind), Tensor<1>>,
}

impl RouterLosses {
    /// The losses of a step whose model loss is multiplied by `loss_scale` for the backward.
    pub fn new(loss_scale: LossFactor) -> Self {
        let state = Mutex::default();
        Self {
            step: Arc::new(StepOfRouters { loss_scale, state }),
            counted: 0.0,
        }
    }

    /// The same step's, for a micro-batch of which this many tokens are in the model's loss.
    pub fn of_micro_batch(&self, counted: usize) -> Self {
        Self {
            counted: counted as f64,
            ..self.clone()
        }
    }

    /// By layer and kind, this rank's part of the losses so far, each times the counted tokens of its micro-batch:
    /// `[1]`, without autodiff. Their sums over all ranks, divided by the counted tokens of the step, are the means.
    pub fn sums(&self) -> BTreeMap<(String, RouterLossKind), Tensor<1>> {
        self.step.state.lock().sums.clone()
    }

    fn record(&self, layer: &str, kind: RouterLossKind, value: Tensor<1>) {
        let mut state = self.step.state.lock();
        let key = (layer.to_string(), kind);
        let sum = match state.sums.remove(&key) {
            Some(sum) => sum + value,
            None => value,
        };
        state.sums.insert(key, sum);
    }

    /// Adds the load of micro-batches; returns that of the step so far.
    fn add_load(&self, layer: &str, load: &[f64]) -> Vec<f64> {
        let mut state = self.step.state.lock();
        let sum = state.loads.entry(layer.to_string()).or_default();
        sum.resize(load.len(), 0.0);
        for (sum, own) in sum.iter_mut().zip(load) {
            *sum += own;
        }
        sum.clone()
    }
}

/// The losses of one router.
#[derive(Debug)]
pub(super) struct LayerLosses {
    losses: Vec<RouterLoss>,
    layer: String,
    config: RouterConfig,
    /// The ranks with parts of the same sequences.
    sequence: Comm,
    /// The ranks with other tokens of the same stage.
    all: Comm,
}

impl LayerLosses {
    /// Collective: call on all ranks of the pipeline stage.
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

    /// `y`, whose backward is also that of the losses of this routing of `sequences` sequences.
    ///
    /// Collective over the tensor, context and data axes, if `y` is tracked.
    pub fn attach(
        &self,
        y: Tensor<3>,
        routing: &Routing,
        sequences: usize,
        losses: &RouterLosses,
    ) -> Tensor<3> {
        if self.losses.is_empty() || !(routing.logits.is_autodiff() && routing.logits.is_tracked())
        {
            return y;
        }
        let load = Load::new(self, routing, sequences);
        let parts = self.losses.iter().map(|loss| {
            let RouterLoss { kind, coefficient } = *loss;
            let value = self.loss(kind, &load, losses).mul_scalar(coefficient);
            losses.record(&self.layer, kind, plain(value.clone()));
            value
        });
        match parts.reduce(|sum, part| sum + part) {
            Some(loss) => {
                let inputs = vec![y.into_dispatch(), loss.into_dispatch()];
                let loss_scale = losses.step.loss_scale.clone();
                apply(inputs, AttachLoss { loss_scale })
            }
            None => y,
        }
    }

    /// This rank's part of `N_mb F / coefficient`, `[1]`.
    fn loss(&self, kind: RouterLossKind, load: &Load, losses: &RouterLosses) -> Tensor<1> {
        let (k, experts) = (self.config.experts_per_token as f64, self.config.experts);
        let (counts, seq) = (&load.counts, load.seq_of_all);
        let sequences = counts.len();
        let tokens = (sequences * seq) as f64;
        match kind {
            RouterLossKind::Balance => {
                let factor = losses.counted * experts as f64 / (k * tokens * tokens);
                load.weighted(&vec![scaled(&total(counts), factor); sequences])
            }
            RouterLossKind::SequenceBalance => {
                let seq = seq as f64;
                let factor = losses.counted * experts as f64 / (k * seq * seq * sequences as f64);
                let counts = counts.iter().map(|counts| scaled(counts, factor));
                load.weighted(&counts.collect::<Vec<_>>())
            }
            RouterLossKind::GlobalBalance => {
                // A rank of the sequence has the counts and tokens of all of them.
                let ranks = self.sequence.size() as f64;
                let own = total(counts).into_iter().chain([tokens, losses.counted]);
                let own = own.map(|value| value / ranks).collect();
                let mut now = sum_over(own, &self.all);
                let counted = now.pop().unwrap_or(0.0);
                let tokens = now[experts];
                let mut so_far = losses.add_load(&self.layer, &now);
                let tokens_so_far = so_far.pop().unwrap_or(tokens);
                let factor = counted * experts as f64 / (k * tokens * tokens_so_far);
                load.weighted(&vec![scaled(&so_far, factor); sequences])
            }
            RouterLossKind::ZLoss => {
                let squares = sum_squared_lse(load.logits.clone(), None);
                squares.mul_scalar(losses.counted / tokens)
            }
        }
    }
}

/// The scores and choices of a micro-batch.
struct Load {
    logits: Tensor<2>,
    /// Of this rank's tokens, by sequence: `[sequences, experts]`.
    scores: Tensor<2>,
    /// By sequence, the tokens of all ranks that chose each expert.
    counts: Vec<Vec<f64>>,
    /// The tokens of one sequence on all ranks.
    seq_of_all: usize,
}

impl Load {
    fn new(layer: &LayerLosses, routing: &Routing, sequences: usize) -> Self {
        let experts = layer.config.experts;
        let mut options = layer.config.options();
        let logits = routing.logits.clone();
        let [tokens, _] = logits.dims();
        let seq = tokens / sequences;
        let choices = match options.groups.take() {
            None => routing.indices.clone(),
            Some(_) => top_k_router(plain(logits.clone()), &options, None).0,
        };
        let counts = read(count_experts(choices, experts, sequences));
        let counts = counts.into_iter().map(|count| count as f64).collect();
        let counts = sum_over(counts, &layer.sequence);
        Self {
            scores: sum_scores(logits.clone(), options.score, sequences, None),
            logits,
            counts: counts.chunks(experts).map(<[f64]>::to_vec).collect(),
            seq_of_all: seq * layer.sequence.size(),
        }
    }

    /// The sum of the scores of this rank's tokens times `factors`, by sequence and expert.
    fn weighted(&self, factors: &[Vec<f64>]) -> Tensor<1> {
        let data = TensorData::new(factors.concat(), self.scores.dims());
        let options = (&self.scores.device(), self.scores.dtype());
        (self.scores.clone() * Tensor::from_data(data, options)).sum()
    }
}

fn scaled(counts: &[f64], factor: f64) -> Vec<f64> {
    counts.iter().map(|count| factor * count).collect()
}

/// The counts of all sequences together.
fn total(counts: &[Vec<f64>]) -> Vec<f64> {
    let mut sum = vec![0.0; counts[0].len()];
    for counts in counts {
        for (sum, count) in sum.iter_mut().zip(counts) {
            *sum += count;
        }
    }
    sum
}

fn sum_over(values: Vec<f64>, comm: &Comm) -> Vec<f64> {
    if comm.size() == 1 {
        return values;
    }
    let sum = comm.all_reduce(Buffer::F64(values), ReduceOp::Sum);
    sum.unwrap_or_else(|error| raise(error)).into_vec()
}

/// The identity, whose backward gives a loss the gradient that it has as a term of the model's loss.
#[derive(Debug)]
struct AttachLoss {
    loss_scale: LossFactor,
}

impl Function for AttachLoss {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let loss = inputs.split_off(1);
        (inputs.remove(0), loss)
    }

    fn backward(
        &self,
        mut saved: Vec<DispatchTensor>,
        gradient: DispatchTensor,
        _needed: &[bool],
    ) -> Vec<Option<DispatchTensor>> {
        let loss = Tensor::<1>::from_dispatch(saved.remove(0));
        let of_loss = self.loss_scale.scale(loss.ones_like());
        vec![Some(gradient), Some(of_loss.into_dispatch())]
    }
}
