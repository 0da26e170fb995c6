//! The largest attention logit of each head in a training step, which [QK-Clip](crate::optim::QkClipConfig) limits.
//!
//! A logit is the scaled dot product of a query and a key that the query attends to, before a soft cap. While a step is
//! measured, each layer records the largest logit of each of this rank's heads over this rank's tokens. Fused kernels
//! return the row maximum that their softmax computes. If a layer is recomputed, its second forward pass computes the
//! same logits again. After the step the logits are reduced over all ranks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::tensor::{Device, Tensor, s};
use burn_megatron_kernels::adamw::outcome::statistics_dtype;
use burn_megatron_kernels::attention::{
    AttentionEngine, AttentionGradients, AttentionInputs, AttentionOutputs, AttentionProblem,
    BackwardInputs,
};
use burn_megatron_kernels::softmax::{self, Mask};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::of_all_stages::of_all_stages;
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::{CommError, ParallelContext, ReduceOp};

/// The initial logit of a head that no rank has measured yet. It is lower than every measured logit.
const LOWEST: f64 = f32::MIN as f64;

/// Registry of the attention layers of a model on this rank, in build order. It measures their largest attention
/// logits. Clones share the registry.
#[derive(Clone, Debug, Default)]
pub struct AttentionLogits(Arc<SharedLogits>);

#[derive(Debug, Default)]
struct SharedLogits {
    /// Whether forward passes are measured.
    is_measured: Arc<AtomicBool>,
    layers: Mutex<Vec<Arc<LayerLogits>>>,
}

/// Description of an attention layer that is registered with [`AttentionLogits`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttentionLayer {
    /// The path of the layer in the model.
    pub path: String,
    /// The pipeline stage that holds the layer.
    pub stage: usize,
    /// The number of query heads, over all ranks.
    pub heads: usize,
    /// The number of query groups, over all ranks.
    pub groups: usize,
    /// Whether queries and keys are normalized after the QKV projection.
    pub has_norm: bool,
    /// The columns of the linear layers whose outputs are the queries and keys.
    pub columns: Vec<HeadColumns>,
}

/// A contiguous range of columns of a linear layer whose outputs are queries or keys. The columns of each head or group
/// are adjacent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadColumns {
    /// The path of the linear layer.
    pub linear: String,
    /// The index of the first column.
    pub first: usize,
    /// The number of heads or groups.
    pub units: usize,
    /// The parts of a head or group in column order, each with its number of columns.
    pub parts: Vec<(HeadPart, usize)>,
}

/// The kind of a part of the features of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HeadPart {
    /// A part of a query that is multiplied by the key of its head or query group.
    Query,
    /// A part of a query that is multiplied by a key that all heads share.
    SharedKeyQuery,
    /// A part of a key.
    Key,
    /// A part of a value.
    Value,
}

impl HeadColumns {
    /// Returns the index of the head or group and the part that `column` computes. Returns `None` if `column` is
    /// outside this range.
    pub fn at(&self, column: usize) -> Option<(usize, HeadPart)> {
        let width = self.parts.iter().map(|(_, width)| width).sum::<usize>();
        let column = column.checked_sub(self.first)?;
        let (unit, mut within) = (column / width, column % width);
        let mut parts = self.parts.iter();
        let (part, _) = parts.find(|(_, width)| match within.checked_sub(*width) {
            Some(behind) => {
                within = behind;
                false
            }
            None => true,
        })?;
        (unit < self.units).then_some((unit, *part))
    }
}

impl AttentionLayer {
    /// Returns the attention layers of all pipeline stages, ordered by stage. This call is collective over the pipeline
    /// axis.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the collective fails.
    pub fn of_all_stages(
        logits: &AttentionLogits,
        groups: &ParallelContext,
    ) -> Result<Vec<Self>, CommError> {
        of_all_stages(&logits.layers(), |layer| layer.stage, groups)
    }
}

impl AttentionLogits {
    /// Adds a layer. `first` is the first head of this tensor rank.
    pub(super) fn register(&self, layer: AttentionLayer, first: usize) -> Arc<LayerLogits> {
        let layer = Arc::new(LayerLogits {
            layer,
            first,
            is_measured: self.0.is_measured.clone(),
            largest: Mutex::default(),
        });
        self.0.layers.lock().push(layer.clone());
        layer
    }

    /// Returns the layers of this rank.
    pub(crate) fn layers(&self) -> Vec<AttentionLayer> {
        let layers = self.0.layers.lock();
        layers.iter().map(|own| own.layer.clone()).collect()
    }

    /// Starts measuring attention logits in forward passes. Measuring stops when [`end_step`](Self::end_step) is
    /// called.
    pub fn begin_step(&self) {
        for layer in self.0.layers.lock().iter() {
            layer.largest.lock().clear();
        }
        self.0.is_measured.store(true, Ordering::Relaxed);
    }

    /// Stops measuring and returns the largest logit of each head since [`begin_step`](Self::begin_step), over all
    /// ranks of `comm`. `layers` are the layers of all stages. The result has one element per head, with the heads of
    /// all layers concatenated. This call is collective over `comm`.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the collective fails.
    pub fn end_step(&self, layers: &[AttentionLayer], device: &Device, comm: &Comm) -> Tensor<1> {
        self.0.is_measured.store(false, Ordering::Relaxed);
        let options = (device, statistics_dtype(device));
        let own = self.0.layers.lock();
        let of_layer = |layer: &AttentionLayer| {
            let unseen = Tensor::<1>::full([layer.heads], LOWEST, options);
            let own = own.iter().find(|own| own.layer == *layer);
            let Some(own) = own else { return unseen };
            let write = |all: Tensor<1>, (first, heads): (usize, Tensor<1>)| {
                let end = first + heads.dims()[0];
                all.slice_assign(s![first..end], heads.cast(options.1))
            };
            let largest = std::mem::take(&mut *own.largest.lock());
            largest.into_iter().fold(unseen, write)
        };
        let all = Tensor::cat(layers.iter().map(of_layer).collect(), 0);
        start(all, &CollectiveOp::AllReduce(ReduceOp::Max), comm).wait()
    }
}

/// The largest logits of a layer.
#[derive(Debug)]
pub(super) struct LayerLogits {
    layer: AttentionLayer,
    /// The first head of this tensor rank.
    first: usize,
    is_measured: Arc<AtomicBool>,
    /// The largest logits `[heads]` of a range of heads, keyed by the first head.
    largest: Mutex<BTreeMap<usize, Tensor<1>>>,
}

impl LayerLogits {
    /// Wraps `engine` so that the attention logits of its forward passes are measured. `first` is the first head that
    /// the engine computes, counted from the first head of this tensor rank.
    pub fn measured(
        self: &Arc<Self>,
        engine: Arc<dyn AttentionEngine>,
        first: usize,
    ) -> Arc<dyn AttentionEngine> {
        Arc::new(MeasuredEngine {
            engine,
            logits: self.clone(),
            first,
        })
    }

    /// Records the largest logits of the unscaled scores `[batch, heads, queries, keys]`. `first` is the first head of
    /// `scores`, counted from the first head of this tensor rank.
    pub fn measure(&self, first: usize, scores: &Tensor<4>, scale: f64, mask: &Mask) {
        if self.is_measured() && !scores.dims().contains(&0) {
            let plain = scores.clone().inner();
            let rows = softmax::composed::largest_scores(plain, scale, mask);
            self.record(first, rows);
        }
    }

    fn is_measured(&self) -> bool {
        self.is_measured.load(Ordering::Relaxed)
    }

    /// Records the largest logit of each query, `[batch, heads, queries]`.
    fn record(&self, first: usize, rows: Tensor<3>) {
        let heads = rows.dims()[1];
        let now = rows.max_dim(2).max_dim(0).reshape([heads]);
        let mut largest = self.largest.lock();
        let entry = largest.remove(&(self.first + first));
        let all = match entry {
            Some(before) => before.max_pair(now),
            None => now,
        };
        largest.insert(self.first + first, all);
    }
}

/// An attention engine that measures its forward passes in a training step.
#[derive(Debug)]
struct MeasuredEngine {
    engine: Arc<dyn AttentionEngine>,
    logits: Arc<LayerLogits>,
    /// The first head, relative to the heads of the tensor rank.
    first: usize,
}

impl AttentionEngine for MeasuredEngine {
    fn name(&self) -> &'static str {
        self.engine.name()
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        self.engine.supports(problem)
    }

    fn forward(&self, problem: &AttentionProblem, inputs: AttentionInputs) -> AttentionOutputs {
        let is_measured = self.logits.is_measured();
        let problem = AttentionProblem {
            with_max: problem.with_max || is_measured,
            ..problem.clone()
        };
        let outputs = self.engine.forward(&problem, inputs);
        if let Some(rows) = outputs.largest.clone().filter(|_| is_measured)
            && !rows.dims().contains(&0)
        {
            self.logits.record(self.first, rows);
        }
        outputs
    }

    fn backward(&self, problem: &AttentionProblem, inputs: BackwardInputs) -> AttentionGradients {
        self.engine.backward(problem, inputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_makes_a_part_of_a_head() {
        let columns = HeadColumns {
            linear: "kv_up".into(),
            first: 4,
            units: 2,
            parts: vec![(HeadPart::Key, 2), (HeadPart::Value, 1)],
        };
        let found: Vec<_> = (3..11).map(|column| columns.at(column)).collect();
        let (key, value) = (HeadPart::Key, HeadPart::Value);
        let of = |unit| [Some((unit, key)), Some((unit, key)), Some((unit, value))];
        assert_eq!(found, [&[None], &of(0)[..], &of(1)[..], &[None]].concat());
    }
}
