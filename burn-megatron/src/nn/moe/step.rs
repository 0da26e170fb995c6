//! What the routers of a model add to a training step, and what they report of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use parking_lot::Mutex;

use super::losses::RouterLossKind;
use crate::nn::LossFactor;

/// The training step that a forward is a part of: routers add their losses to it, and count the tokens of their
/// experts.
///
/// Made for a step on each rank, handed through the forward of the micro-batches. Without it, and in a forward that is
/// not recorded by autodiff, such as the first pass of a [recomputed](crate::nn::recompute) block, routers add and
/// count nothing.
#[derive(Clone, Debug)]
pub struct RouterStep {
    shared: Arc<SharedStep>,
    counted: f64,
}

#[derive(Debug)]
struct SharedStep {
    loss_scale: LossFactor,
    layers: Mutex<BTreeMap<String, LayerStep>>,
}

/// What a layer has reported so far.
#[derive(Debug, Default)]
struct LayerStep {
    /// The load of the data ranks, for [`RouterLossKind::GlobalBalance`].
    global: Option<Tensor<1>>,
    losses: BTreeMap<RouterLossKind, Tensor<1>>,
    load: Option<RankLoad>,
}

/// The load of the experts of a layer by the tokens of a rank.
#[derive(Clone, Debug)]
pub struct RankLoad {
    /// The tokens that each expert computes: `[experts]`, without autodiff.
    pub tokens: Tensor<1, Int>,
    /// The pairs of a token and an expert that it chose, those that a [capacity](super::Capacity) drops included.
    pub pairs: u64,
}

impl RouterStep {
    /// A step whose model loss is multiplied by `loss_scale` for the backward.
    pub fn new(loss_scale: LossFactor) -> Self {
        let layers = Mutex::default();
        Self {
            shared: Arc::new(SharedStep { loss_scale, layers }),
            counted: 0.0,
        }
    }

    /// The same step, for a micro-batch of which this many tokens are in the model's loss.
    pub fn of_micro_batch(&self, counted: usize) -> Self {
        Self {
            counted: counted as f64,
            ..self.clone()
        }
    }

    /// By layer and kind, this rank's part of the losses so far, each times the counted tokens of its micro-batch:
    /// `[1]`, without autodiff. Their sums over all ranks, divided by the counted tokens of the step, are the means.
    pub fn losses(&self) -> BTreeMap<(String, RouterLossKind), Tensor<1>> {
        let layers = self.shared.layers.lock();
        let of_layer = |(path, layer): (&String, &LayerStep)| {
            let losses = layer.losses.clone().into_iter();
            let path = path.clone();
            losses.map(move |(kind, sum)| ((path.clone(), kind), sum))
        };
        layers.iter().flat_map(of_layer).collect()
    }

    /// By layer, the load by this rank's tokens so far.
    pub fn loads(&self) -> BTreeMap<String, RankLoad> {
        let layers = self.shared.layers.lock();
        let load = |(path, layer): (&String, &LayerStep)| Some((path.clone(), layer.load.clone()?));
        layers.iter().filter_map(load).collect()
    }

    /// The counted tokens of the micro-batch.
    pub(super) fn counted(&self) -> f64 {
        self.counted
    }

    /// By which the loss of the model is multiplied.
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

    /// Adds the load of the micro-batches of all data ranks; returns that of the step so far.
    pub(super) fn add_global_load(&self, path: &str, load: Tensor<1>) -> Tensor<1> {
        self.with_layer(path, |layer| {
            let sum = match layer.global.take() {
                Some(sum) => sum + load,
                None => load,
            };
            layer.global = Some(sum.clone());
            sum
        })
    }

    fn with_layer<T>(&self, path: &str, change: impl FnOnce(&mut LayerStep) -> T) -> T {
        let mut layers = self.shared.layers.lock();
        change(layers.entry(path.to_string()).or_default())
    }
}
