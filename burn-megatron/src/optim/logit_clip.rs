//! QK-Clip (MuonClip of Kimi K2, arXiv:2507.20534, section 2.1). After a step, QK-Clip scales down the query and key
//! weights of each head whose largest attention logit in the step exceeds a threshold. QK-Clip corresponds to `clip_qk`
//! in Megatron-Core.
//!
//! `S` is the largest logit of a head, or of all heads that share a key. `t` is the threshold. If `S > t`, then
//! `g = t / S`. After the optimizer step and before the parameters are gathered, the columns of weights and biases are
//! scaled:
//!
//! - query columns by `g^alpha`,
//! - key columns by `g^(1 - alpha)`,
//! - in latent attention, the query columns for the shared key by `g`.
//!
//! The other columns do not change.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_megatron_kernels::flat;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::OptimizerError;
use super::setting::{self, Setting};
use crate::collective::to_host;
use crate::comm::ReduceOp;
use crate::data_parallel::layout::ParameterSlice;
use crate::data_parallel::{AfterStep, BucketShard, DistributedDataParallel, SteppedBucket};
use crate::mesh::{Axis, MeshRank};
use crate::nn::{AttentionLayer, HeadPart, ParameterEntry, ParameterTable};

/// Settings of QK-Clip. The defaults are the same as in Megatron-Core.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct QkClipConfig {
    /// The threshold: the weights of a head are scaled if its largest attention logit is larger.
    pub threshold: f64,
    /// The exponent with which queries are scaled, above 0 and below 1. Queries are scaled by `g^alpha` and keys by
    /// `g^(1 - alpha)`, where `g` is the threshold divided by the largest logit.
    pub alpha: f64,
}

/// A reason why QK-Clip cannot limit the attention logits of a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QkClipError {
    /// A layer normalizes its queries and keys, so QK-Clip cannot limit its attention logits.
    #[error(
        "qk_clip cannot limit the logits of {path}: its queries and keys are normalized after their projections, so the \
         scale of the weights does not change them; remove qk_clip"
    )]
    Normalized {
        /// The path of the layer.
        path: String,
    },
    /// The model has no trained query or key weights that QK-Clip could scale.
    #[error(
        "qk_clip has no weights to scale: no projection of queries and keys of this model is trained; remove qk_clip, \
         or train one"
    )]
    NothingToClip,
}

impl Default for QkClipConfig {
    fn default() -> Self {
        Self {
            threshold: 100.0,
            alpha: 0.5,
        }
    }
}

impl QkClipConfig {
    /// Checks the settings of QK-Clip.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Setting`] for the first setting that is out of range.
    pub fn check(&self) -> Result<(), OptimizerError> {
        let is_share = self.alpha > 0.0 && self.alpha < 1.0;
        setting::check(vec![
            setting::above_zero("qk_clip.threshold", self.threshold),
            Setting::new("qk_clip.alpha", self.alpha, is_share, "above 0 and below 1"),
        ])
    }
}

/// QK-Clip for the parameters of a model.
pub struct QkClip {
    config: QkClipConfig,
    /// The layers of this rank.
    layers: Vec<ClippedLayer>,
    /// The clipped segments of each bucket.
    segments: Vec<Vec<ClippedSegment>>,
}

/// A layer whose weights are clipped.
struct ClippedLayer {
    /// The index of its first head among the heads of all layers of all stages.
    first: usize,
    heads: usize,
    groups: usize,
}

/// A part of this rank's shard of a bucket: elements of a parameter `[.., columns]`.
struct ClippedSegment {
    range: Range<usize>,
    /// The index of the first element within the parameter.
    start: usize,
    device: Device,
    dtype: FloatDType,
    /// For each column, the index of its factor in all [factors](QkClip::factors).
    columns: Tensor<1, Int>,
}

/// The factors of a segment's elements.
struct SegmentFactors {
    range: Range<usize>,
    start: usize,
    /// `[columns]`
    columns: Tensor<1>,
}

impl QkClip {
    /// Creates QK-Clip for the attention layers of all stages. Collective: call on all ranks of the pipeline.
    ///
    /// # Errors
    ///
    /// [`OptimizerError`] if a layer normalizes its queries and keys, or if all query and key projections of the model
    /// are frozen or missing.
    pub fn new<M: Module>(
        config: &QkClipConfig,
        layers: &[AttentionLayer],
        ddp: &DistributedDataParallel<M>,
    ) -> Result<Self, OptimizerError> {
        check_norms(layers)?;
        let own = ddp.attention_logits().layers();
        let columns = factors_of_columns(&own, ddp);
        let is_any = i64::from(!columns.is_empty());
        if ddp
            .groups()
            .pipeline()
            .all_reduce_scalar(is_any, ReduceOp::Max)?
            == 0
        {
            return Err(QkClipError::NothingToClip.into());
        }
        let of_shard = |shard: &BucketShard| {
            let clipped = |slice: &ParameterSlice| {
                let columns = columns.get(&slice.index)?;
                let shape = [columns.len()];
                let columns = TensorData::new(columns.clone(), shape);
                Some(ClippedSegment {
                    range: slice.local_range.clone(),
                    start: slice.parameter_range.start,
                    device: shard.device.clone(),
                    dtype: FloatDType::from(shard.dtype),
                    columns: Tensor::from_data(columns, &shard.device),
                })
            };
            shard.slices.iter().filter_map(clipped).collect()
        };
        let place = |layer: &AttentionLayer| {
            let before = layers.iter().take_while(|other| *other != layer);
            ClippedLayer {
                first: before.map(|layer| layer.heads).sum(),
                heads: layer.heads,
                groups: layer.groups,
            }
        };
        Ok(Self {
            config: *config,
            layers: own.iter().map(place).collect(),
            segments: ddp.shards().iter().map(of_shard).collect(),
        })
    }

    /// Checks the attention layers in the parameter table of a complete model, before the model is built.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn check_layers(
        layers: &[AttentionLayer],
        table: &ParameterTable,
    ) -> Result<(), OptimizerError> {
        check_norms(layers)?;
        let is_trained = |linear: &str| {
            let paths = ["weight", "bias"].map(|name| format!("{linear}.{name}"));
            let mut entries = table.entries().iter();
            entries.any(|entry| !entry.frozen && paths.contains(&entry.path))
        };
        let mut columns = layers.iter().flat_map(|layer| &layer.columns);
        match columns.any(|columns| is_trained(&columns.linear)) {
            true => Ok(()),
            false => Err(QkClipError::NothingToClip.into()),
        }
    }

    /// Returns the function that scales the master weights after a step. `logits` contains the largest logit of each
    /// head of all stages. If the outcome of the step is only on the device, pass it as `taken`, a tensor `[1]`. If its
    /// value is 0, the weights are not changed.
    pub fn change(&self, logits: &Tensor<1>, taken: Option<&Tensor<1>>) -> AfterStep {
        let factors = self.factors(logits, taken);
        let segments = || self.segments.iter().flatten();
        let is_host = |segment: &ClippedSegment| segment.device != factors.device();
        let on_host = segments().any(is_host).then(|| to_host(factors.clone()));
        let of_segment = |segment: &ClippedSegment| {
            let factors = match &on_host {
                Some(on_host) if is_host(segment) => on_host,
                _ => &factors,
            };
            let columns = factors.clone().select(0, segment.columns.clone());
            SegmentFactors {
                range: segment.range.clone(),
                start: segment.start,
                columns: columns.cast(segment.dtype),
            }
        };
        let by_bucket = self.segments.iter();
        let by_bucket = by_bucket.map(|bucket| bucket.iter().map(of_segment).collect());
        let by_bucket: Vec<Vec<_>> = by_bucket.collect();
        AfterStep(Arc::new(move |bucket, stepped| {
            let segments = by_bucket[bucket].iter();
            segments.fold(stepped, |stepped, segment| segment.scaled(stepped))
        }))
    }

    /// Returns the number 1, followed by three factors per group for each layer: the factors of queries, of keys, and
    /// of queries for a shared key.
    fn factors(&self, logits: &Tensor<1>, taken: Option<&Tensor<1>>) -> Tensor<1> {
        let QkClipConfig { threshold, alpha } = self.config;
        let mut all = vec![Tensor::ones([1], (&logits.device(), logits.dtype()))];
        for ClippedLayer {
            first,
            heads,
            groups,
        } in &self.layers
        {
            let own = logits.clone().narrow(0, *first, *heads);
            let largest = own.reshape([*groups, heads / groups]).max_dim(1);
            let largest: Tensor<1> = largest.reshape([*groups]);
            // A logit that is not finite belongs to a step that is not taken.
            let finite = largest.clone().lower_elem(f64::from(f32::MAX));
            let mut clips = largest.clone().greater_elem(threshold).bool_and(finite);
            if let Some(taken) = taken {
                let taken = taken.clone().greater_elem(0.0);
                clips = clips.bool_and(taken.expand([*groups]));
            }
            let factor = largest.recip().mul_scalar(threshold);
            let kept = clips.bool_not();
            for exponent in [alpha, 1.0 - alpha, 1.0] {
                let power = factor.clone().powf_scalar(exponent);
                all.push(power.mask_fill(kept.clone(), 1.0));
            }
        }
        Tensor::cat(all, 0)
    }
}

/// Checks that no layer normalizes its queries and keys. The logits of such a layer do not depend on the scale of the
/// weights.
fn check_norms(layers: &[AttentionLayer]) -> Result<(), QkClipError> {
    match layers.iter().find(|layer| layer.has_norm) {
        Some(AttentionLayer { path, .. }) => Err(QkClipError::Normalized { path: path.clone() }),
        None => Ok(()),
    }
}

/// Returns, for each clipped parameter of this rank, the index of the factor of each column. The key is the index of
/// the parameter.
fn factors_of_columns<M: Module>(
    layers: &[AttentionLayer],
    ddp: &DistributedDataParallel<M>,
) -> BTreeMap<usize, Vec<i32>> {
    let (entries, rank) = (ddp.table().entries(), ddp.groups().mesh_rank());
    let (mut all, mut next) = (BTreeMap::new(), 1);
    for layer in layers {
        for columns in &layer.columns {
            for name in ["weight", "bias"] {
                let path = format!("{}.{name}", columns.linear);
                let Some(index) = entries.iter().position(|entry| entry.path == path) else {
                    continue;
                };
                let whole = columns_on(&entries[index], rank);
                let own = all.entry(index).or_insert_with(|| vec![0; whole.len()]);
                for (factor, column) in own.iter_mut().zip(whole) {
                    let Some((unit, part)) = columns.at(column) else {
                        continue;
                    };
                    let group = unit * layer.groups / columns.units;
                    let of = |number: usize| (next + number * layer.groups + group) as i32;
                    match part {
                        HeadPart::Query => *factor = of(0),
                        HeadPart::Key => *factor = of(1),
                        HeadPart::SharedKeyQuery => *factor = of(2),
                        HeadPart::Value => {}
                    }
                }
            }
        }
        next += 3 * layer.groups;
    }
    all
}

/// Returns the columns of a parameter (its last dimension) on this rank.
fn columns_on(entry: &ParameterEntry, rank: &MeshRank) -> Vec<usize> {
    let place = rank.on(entry.grid, Axis::Tensor);
    let sections = entry.placements.on(Axis::Tensor).local_sections(place);
    if sections.is_empty() {
        let columns = entry.shape.last().copied().unwrap_or(0);
        return (0..columns).collect();
    }
    let sections = sections.into_iter();
    sections.flat_map(|section| section.whole).collect()
}

impl SegmentFactors {
    /// Returns the bucket with scaled elements.
    fn scaled(&self, stepped: SteppedBucket) -> SteppedBucket {
        let (columns, count) = (self.columns.dims()[0], self.range.len());
        let row = self.start / columns;
        let rows = (self.start + count).div_ceil(columns) - row;
        let factors = self.columns.clone().reshape([1, columns]);
        let factors = factors.expand([rows, columns]).reshape([rows * columns]);
        let factors = factors.narrow(0, self.start - row * columns, count);
        let own: Tensor<1> = stepped.master.clone().slice([self.range.clone()]);
        let start = self.range.start;
        SteppedBucket {
            master: flat::accumulate(stepped.master, start, own * factors, false),
            model: None,
        }
    }
}
