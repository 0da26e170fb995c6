//! Reads the tensors of an upcycled model from a dense model.

use std::collections::BTreeMap;

use burn::tensor::{DType, Device, TensorData};
use burn_megatron::checkpoint::{
    CheckpointError, ElementType, MODEL, TensorMeta, TensorSlice, TensorSource,
};
use burn_megatron::comm::ParallelContext;
use burn_megatron::kernels::philox::Stream;
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::{BuildError, ModelBuilder};

use super::experts::ExpertSlices;
use super::{Factors, UpcycleConfig, UpcycleError};
use crate::{TransformerConfig, weights};

/// The number of elements that are converted to f64 at a time.
const BLOCK: usize = 1 << 16;

/// An upcycled model: a [`TensorSource`] of a mixture-of-experts model whose tensors are computed from a dense model.
/// Tensors of the dense model are read on demand.
pub struct Upcycled<'a> {
    dense: &'a dyn TensorSource,
    config: UpcycleConfig,
    model: TransformerConfig,
    tensors: BTreeMap<String, (TensorMeta, Origin)>,
}

/// The origin of the values of a tensor in the upcycled model.
enum Origin {
    /// The tensor of the dense model with the same key.
    Dense,
    /// Slices of an MLP of the dense model.
    Experts(ExpertSlices),
    /// Random weights, in the dtype of a tensor of the MLP.
    Router { stream: u64, like: String },
}

impl<'a> Upcycled<'a> {
    /// Creates the upcycled model from the tensors in `dense`, a dense model with the configuration `model`.
    ///
    /// # Errors
    ///
    /// [`UpcycleError`] if the sizes are inconsistent, or if a tensor does not belong to the model.
    pub fn new(
        dense: &'a dyn TensorSource,
        model: &TransformerConfig,
        config: &UpcycleConfig,
    ) -> Result<Self, UpcycleError> {
        let upcycled = config.model(model)?;
        let old = shapes(model)?;
        weights::check(dense, &old)?;
        let mut tensors = BTreeMap::new();
        for (key, shape) in shapes(&upcycled)? {
            let origin = if old.contains_key(&key) {
                Some(Origin::Dense)
            } else {
                Origin::of_experts(&key, model, config)
            };
            let missing = || CheckpointError::missing(dense.name(), &key);
            let origin = origin.ok_or_else(missing)?;
            let like = dense.tensor(origin.key(&key)).ok_or_else(missing)?;
            let meta = TensorMeta {
                key: key.clone(),
                dtype: like.dtype,
                shape,
            };
            tensors.insert(key, (meta, origin));
        }
        Ok(Self {
            dense,
            config: config.clone(),
            model: upcycled,
            tensors,
        })
    }

    /// Returns the configuration of the mixture-of-experts model.
    pub fn model(&self) -> &TransformerConfig {
        &self.model
    }

    /// Returns rows of the weight of a router. Each of the first `E / G` columns of random weights is repeated `G`
    /// times.
    fn router(&self, stream: u64, slice: &TensorSlice, dtype: ElementType) -> Vec<u8> {
        let (experts, granularity) = (self.config.moe.experts, self.config.granularity);
        let (stream, mut row) = (Stream::new(stream, 0), vec![0.0; experts / granularity]);
        let mut values = Vec::with_capacity(slice.len());
        for feature in slice.range(0) {
            let start = feature as u64 * experts as u64;
            stream.normals(start, row.len(), |i, x| row[i] = self.model.init_std * x);
            values.extend(slice.range(1).map(|expert| row[expert / granularity]));
        }
        rounded(values, dtype).as_bytes().to_vec()
    }

    /// Returns a slice of a tensor of experts.
    fn experts(
        &self,
        tensor: &TensorMeta,
        slices: &ExpertSlices,
        slice: &TensorSlice,
    ) -> Result<Vec<u8>, CheckpointError> {
        let size = tensor.dtype.size();
        let mut all = vec![0; slice.len() * size];
        for part in slices.parts(&tensor.shape, slice) {
            let values = self.dense.read(&slices.key, &part.dense)?;
            let overflows = || {
                let what = format!("{} overflows {} in an expert", slices.key, tensor.dtype);
                CheckpointError::corrupt(self.dense.name(), what)
            };
            let values = multiplied(values, part.factor, tensor.dtype).ok_or_else(overflows)?;
            for run in part.own.within(slice).runs(&slice.shape) {
                let [to, from, len] = [run.in_tensor, run.in_slice, run.len].map(|n| n * size);
                all[to..to + len].copy_from_slice(&values[from..from + len]);
            }
        }
        Ok(all)
    }
}

impl TensorSource for Upcycled<'_> {
    fn name(&self) -> String {
        format!("{} with experts", self.dense.name())
    }

    fn keys(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        self.tensors.get(key).map(|(meta, _)| meta.clone())
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let missing = || CheckpointError::missing(self.name(), key);
        let (meta, origin) = self.tensors.get(key).ok_or_else(missing)?;
        CheckpointError::check_bounds(key, &meta.shape, slice)?;
        match origin {
            Origin::Dense => self.dense.read(key, slice),
            Origin::Experts(slices) => self.experts(meta, slices, slice),
            Origin::Router { stream, .. } => Ok(self.router(*stream, slice, meta.dtype)),
        }
    }
}

impl Origin {
    /// Returns the origin of a tensor in `blocks.N.moe`, or `None` if the MLP has no corresponding tensor.
    fn of_experts(key: &str, model: &TransformerConfig, config: &UpcycleConfig) -> Option<Self> {
        let (block, name) = key.split_once(".moe.")?;
        let dense = |name: &str| format!("{block}.mlp.{name}");
        let Factors {
            up,
            down,
            down_bias,
        } = config.factors(model.activation);
        let (name, dim, factors) = match name {
            "router.gate" => {
                let path = key.strip_prefix(MODEL)?;
                let stream = builder(config.seed).child(path).stream_key();
                let like = dense("down.weight");
                return Some(Self::Router { stream, like });
            }
            "experts.up" => ("up.weight", Some(1), up),
            "experts.up_bias" => ("up.bias", Some(0), up),
            "experts.down" => ("down.weight", Some(0), vec![down]),
            "experts.down_bias" => ("down.bias", None, vec![down_bias]),
            _ => return None,
        };
        Some(Self::Experts(ExpertSlices {
            key: dense(name),
            dim,
            factors,
            granularity: config.granularity,
        }))
    }

    /// Returns the key of the dense tensor that determines the dtype of the tensor `key`.
    fn key<'a>(&'a self, key: &'a str) -> &'a str {
        match self {
            Self::Dense => key,
            Self::Experts(slices) => &slices.key,
            Self::Router { like, .. } => like,
        }
    }
}

/// Returns the shapes of a model's parameters by their keys.
fn shapes(model: &TransformerConfig) -> Result<BTreeMap<String, Vec<usize>>, BuildError> {
    let outline = model.init_with(builder(0).outline())?;
    let entries = outline.table.entries().iter();
    let keyed = entries.map(|entry| (format!("{MODEL}{}", entry.path), entry.shape.clone()));
    Ok(keyed.collect())
}

fn builder(seed: u64) -> ModelBuilder {
    ModelBuilder::with(
        &ParallelContext::single(),
        &Device::flex(),
        seed,
        DType::F32,
    )
}

/// Multiplies values by a factor and rounds the results once. Returns `None` if a result is infinite.
fn multiplied(values: Vec<u8>, factor: f64, dtype: ElementType) -> Option<Vec<u8>> {
    if factor == 1.0 {
        return Some(values);
    }
    let infinite = |data: &TensorData| data.iter::<f64>().filter(|x| x.is_infinite()).count();
    let mut all = Vec::with_capacity(values.len());
    for block in values.chunks(BLOCK * dtype.size()) {
        let len = block.len() / dtype.size();
        let before = TensorData::from_bytes_vec(block.to_vec(), [len], dtype.dtype());
        let after = rounded(before.iter::<f64>().map(|x| factor * x).collect(), dtype);
        if infinite(&before) != infinite(&after) {
            return None;
        }
        all.extend_from_slice(after.as_bytes());
    }
    Some(all)
}

fn rounded(values: Vec<f64>, dtype: ElementType) -> TensorData {
    let len = values.len();
    TensorData::new(values, [len]).convert_dtype(dtype.dtype())
}
