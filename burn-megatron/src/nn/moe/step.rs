//! The router state of a training step: the losses that routers add, and the expert loads that they report.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use parking_lot::Mutex;

use super::loss_kind::RouterLossKind;
use crate::nn::LossFactor;
use crate::nn::forward_context::is_tracked;
use crate::nn::forward_context::{self, ForwardMode};

/// The router state of a training step. In a forward pass with this state, routers add their losses and count the
/// tokens of each expert.
///
/// Create a `RouterStep` at the beginning of a step on each rank, and pass it to the forward passes of all
/// micro-batches. In a forward pass without a `RouterStep` or without a backward pass, routers add no losses and count
/// no tokens. In a [recomputed](crate::nn::recompute) block, routers count tokens in the first pass, in forward order.
/// They add their losses in the second pass.
#[derive(Clone, Debug)]
pub struct RouterStep {
    shared: Arc<SharedStep>,
    counted: f64,
    /// The loads that a first pass of this micro-batch has found, keyed by layer.
    first_pass: Arc<Mutex<BTreeMap<String, Vec<GlobalLoad>>>>,
}

/// The load of all data ranks: `[experts + 2]`, not tracked by autodiff.
#[derive(Clone, Debug)]
pub(super) struct GlobalLoad {
    /// The load of the micro-batch.
    pub now: Tensor<1>,
    /// The load of the step so far.
    pub so_far: Tensor<1>,
}

/// The kind of a router's forward pass in a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RouterPass {
    /// A forward pass that is recorded on the autodiff graph.
    Recorded,
    /// The first pass of a recomputed block.
    First,
    /// The second pass of a recomputed block.
    Second,
}

impl RouterPass {
    /// Returns which pass of the model computed these logits, or `None` if no backward pass follows.
    pub fn of(logits: &Tensor<2>) -> Option<Self> {
        let is_tracked = is_tracked(logits);
        match forward_context::mode() {
            ForwardMode::FirstPass => Some(Self::First),
            ForwardMode::Recorded => is_tracked.then_some(Self::Recorded),
            ForwardMode::SecondPass => is_tracked.then_some(Self::Second),
        }
    }

    /// Returns whether the router reports its load and its losses in this pass. It reports once per micro-batch.
    pub fn reports(self) -> bool {
        self != Self::Second
    }
}

#[derive(Debug)]
struct SharedStep {
    loss_scale: LossFactor,
    layers: Mutex<BTreeMap<String, LayerStep>>,
}

/// The reports of a layer so far.
#[derive(Debug, Default)]
struct LayerStep {
    /// The load of the data ranks, for [`RouterLossKind::GlobalBalance`].
    global: Option<Tensor<1>>,
    losses: BTreeMap<RouterLossKind, Tensor<1>>,
    load: Option<RankLoad>,
}

/// The expert load of one MoE layer, counted over the tokens of one rank.
#[derive(Clone, Debug)]
pub struct RankLoad {
    /// The number of this rank's tokens that each expert processes: `[experts]`, not tracked by autodiff.
    pub tokens: Tensor<1, Int>,
    /// The number of token-expert pairs: one for each real token and each expert that the token chooses. This number
    /// includes pairs that are dropped because of a [capacity](super::Capacity).
    pub pairs: u64,
}

impl RouterStep {
    /// Creates the state of a step. The caller must multiply the model loss by `loss_scale` before the backward pass.
    pub fn new(loss_scale: LossFactor) -> Self {
        let layers = Mutex::default();
        Self {
            shared: Arc::new(SharedStep { loss_scale, layers }),
            counted: 0.0,
            first_pass: Arc::default(),
        }
    }

    /// Returns the state to pass to the forward pass of one micro-batch of this step. `counted` is the number of tokens
    /// of the micro-batch that count in the model loss.
    pub fn of_micro_batch(&self, counted: usize) -> Self {
        Self {
            counted: counted as f64,
            first_pass: Arc::default(),
            ..self.clone()
        }
    }

    /// Returns this rank's part of each router loss of the step so far, keyed by layer path and kind. Each value is
    /// `[1]` and not tracked by autodiff. The loss of each micro-batch is multiplied by the number of its tokens that
    /// count in the model loss. To get the mean loss, sum the values over all ranks, and divide the sum by the number
    /// of such tokens in the step.
    pub fn losses(&self) -> BTreeMap<(String, RouterLossKind), Tensor<1>> {
        let layers = self.shared.layers.lock();
        let of_layer = |(path, layer): (&String, &LayerStep)| {
            let losses = layer.losses.clone().into_iter();
            let path = path.clone();
            losses.map(move |(kind, sum)| ((path.clone(), kind), sum))
        };
        layers.iter().flat_map(of_layer).collect()
    }

    /// Returns the expert load of this rank's tokens in the step so far, keyed by layer path.
    pub fn loads(&self) -> BTreeMap<String, RankLoad> {
        let layers = self.shared.layers.lock();
        let load = |(path, layer): (&String, &LayerStep)| Some((path.clone(), layer.load.clone()?));
        layers.iter().filter_map(load).collect()
    }

    /// Returns the number of tokens of the micro-batch that count in the model loss.
    pub(super) fn counted(&self) -> f64 {
        self.counted
    }

    /// Returns the factor of the model loss.
    pub(super) fn loss_scale(&self) -> &LossFactor {
        &self.shared.loss_scale
    }

    pub(super) fn record_loss(&self, path: &str, kind: RouterLossKind, value: Tensor<1>) {
        self.with_layer(path, |layer| {
            let sum = match layer.losses.remove(&kind) {
                Some(sum) => sum + value,
                None => value,
            };
            layer.losses.insert(kind, sum);
        });
    }

    pub(super) fn record_load(&self, path: &str, more: RankLoad) {
        self.with_layer(path, |layer| {
            layer.load = Some(match layer.load.take() {
                Some(RankLoad { tokens, pairs }) => RankLoad {
                    tokens: tokens + more.tokens,
                    pairs: pairs + more.pairs,
                },
                None => more,
            });
        });
    }

    /// Returns the load of all data ranks, for this micro-batch and for the step so far. `now` computes the load of
    /// this micro-batch. A second pass returns the loads of the first pass.
    pub(super) fn global_load(
        &self,
        path: &str,
        pass: RouterPass,
        now: impl FnOnce() -> Tensor<1>,
    ) -> GlobalLoad {
        if pass == RouterPass::Second {
            let mut layers = self.first_pass.lock();
            let found = layers.get_mut(path).and_then(Vec::pop);
            return match found {
                Some(found) => found,
                None => unreachable!("a second pass follows a first one"),
            };
        }
        let now = now();
        let so_far = self.with_layer(path, |layer| {
            let sum = match layer.global.take() {
                Some(sum) => sum + now.clone(),
                None => now.clone(),
            };
            layer.global = Some(sum.clone());
            sum
        });
        let load = GlobalLoad { now, so_far };
        if pass == RouterPass::First {
            let mut layers = self.first_pass.lock();
            let of_layer = layers.entry(path.into()).or_default();
            of_layer.push(load.clone());
        }
        load
    }

    fn with_layer<T>(&self, path: &str, change: impl FnOnce(&mut LayerStep) -> T) -> T {
        let mut layers = self.shared.layers.lock();
        change(layers.entry(path.to_string()).or_default())
    }
}
