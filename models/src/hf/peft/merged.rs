//! Combines the weights of a model with its LoRA adapters, either merged into the weights or as separate tensors.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_megatron::checkpoint::{
    CheckpointError, ElementType, MODEL, TensorMeta, TensorSlice, TensorSource,
};
use burn_megatron::nn::lora::{AdaptedLayer, LoraLayers};

use crate::weights::check_tensor;

/// A [`TensorSource`] of the weights of a model with merged LoRA adapters: `W + s A B`, where `s` is the scale of the
/// adapter. The sum is computed in f32 (f64 for f64 weights), and rounded once to the dtype of the weight.
pub struct MergedAdapters {
    base: Box<dyn TensorSource>,
    adapters: Box<dyn TensorSource>,
    layers: LoraLayers,
}

impl MergedAdapters {
    /// Merges the weights in `base` with the LoRA adapters. The tensors are merged when they are read.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] if a tensor is missing or has another shape.
    pub fn new(
        base: Box<dyn TensorSource>,
        adapters: Box<dyn TensorSource>,
        layers: LoraLayers,
    ) -> Result<Self, CheckpointError> {
        let rank = layers.config.rank;
        for layer in &layers.layers {
            let [input, output] = layer.size;
            let factors = [("a", [input, rank]), ("b", [rank, output])];
            for (name, wanted) in factors {
                let key = format!("{MODEL}{}.{name}", layer.adapter);
                check_tensor(&*adapters, &key, |shape| *shape == wanted, &wanted)?;
            }
            let key = format!("{MODEL}{}", layer.weight);
            let wanted = [input, layer.offset + output];
            let fits =
                |shape: &[usize]| shape.len() == 2 && shape[0] == input && shape[1] >= wanted[1];
            check_tensor(&*base, &key, fits, &wanted)?;
        }
        Ok(Self {
            base,
            adapters,
            layers,
        })
    }

    /// Adds the product of the LoRA matrices of a layer to the columns of the layer in a slice.
    fn add(
        &self,
        weight: Tensor<2>,
        layer: &AdaptedLayer,
        slice: &TensorSlice,
    ) -> Result<Tensor<2>, CheckpointError> {
        let (rank, [_, output]) = (self.layers.config.rank, layer.size);
        let columns = slice.range(1);
        let first = columns.start.max(layer.offset);
        let end = columns.end.min(layer.offset + output);
        if first >= end {
            return Ok(weight);
        }
        let dtype = FloatDType::from(weight.dtype());
        let a = TensorSlice {
            offset: vec![slice.offset[0], 0],
            shape: vec![slice.shape[0], rank],
        };
        let b = TensorSlice {
            offset: vec![0, first - layer.offset],
            shape: vec![rank, end - first],
        };
        let factor = |name: &str, slice: &TensorSlice| {
            let key = format!("{MODEL}{}.{name}", layer.adapter);
            read(&*self.adapters, &key, slice, dtype)
        };
        let product = factor("a", &a)?.matmul(factor("b", &b)?);
        let ranges = [
            0..slice.shape[0],
            first - columns.start..end - columns.start,
        ];
        let scaled = product.mul_scalar(self.layers.config.scale());
        let sum = weight.clone().slice(ranges.clone()) + scaled;
        Ok(weight.slice_assign(ranges, sum))
    }
}

/// Reads a slice of a matrix in the given type.
fn read(
    source: &dyn TensorSource,
    key: &str,
    slice: &TensorSlice,
    dtype: FloatDType,
) -> Result<Tensor<2>, CheckpointError> {
    let found = source.tensor(key).map(|meta| meta.dtype);
    let bytes = source.read(key, slice)?;
    let from = found.unwrap_or(ElementType::F32).dtype();
    let data = TensorData::from_bytes_vec(bytes, slice.shape.clone(), from);
    let options = (&Device::flex(), DType::from(dtype));
    Ok(Tensor::from_data(
        data.convert_dtype(DType::from(dtype)),
        options,
    ))
}

impl TensorSource for MergedAdapters {
    fn name(&self) -> String {
        format!("{} with {}", self.base.name(), self.adapters.name())
    }

    fn keys(&self) -> Vec<String> {
        self.base.keys()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        self.base.tensor(key)
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        let path = key.strip_prefix(MODEL);
        let layers = self.layers.layers.iter();
        let own = layers.filter(|layer| Some(&layer.weight[..]) == path);
        let own: Vec<_> = own.collect();
        let (Some(meta), false) = (self.tensor(key), own.is_empty()) else {
            return self.base.read(key, slice);
        };
        let dtype = match meta.dtype {
            ElementType::F64 => FloatDType::F64,
            _ => FloatDType::F32,
        };
        let mut weight = read(&*self.base, key, slice, dtype)?;
        for layer in own {
            weight = self.add(weight, layer, slice)?;
        }
        let data = weight.into_data().convert_dtype(meta.dtype.dtype());
        Ok(data.as_bytes().to_vec())
    }
}

/// A [`TensorSource`] of the weights of a model and of its LoRA adapters as separate tensors. Use it in a run that
/// continues to train the adapters.
pub struct WithAdapters {
    /// The source of the model weights.
    pub base: Box<dyn TensorSource>,
    /// The source of the adapter weights.
    pub adapters: Box<dyn TensorSource>,
}

impl WithAdapters {
    fn of(&self, key: &str) -> &dyn TensorSource {
        match self.adapters.tensor(key) {
            Some(_) => &*self.adapters,
            None => &*self.base,
        }
    }
}

impl TensorSource for WithAdapters {
    fn name(&self) -> String {
        format!("{} with {}", self.base.name(), self.adapters.name())
    }

    fn keys(&self) -> Vec<String> {
        let adapters = self.adapters.keys().into_iter();
        let own = adapters.filter(|key| self.base.tensor(key).is_none());
        self.base.keys().into_iter().chain(own).collect()
    }

    fn tensor(&self, key: &str) -> Option<TensorMeta> {
        self.of(key).tensor(key)
    }

    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError> {
        self.of(key).read(key, slice)
    }
}
