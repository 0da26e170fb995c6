//! The shapes and dtypes of transferred tensors, which both ranks must have before a tensor is sent.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use crate::collective::wire_dtype;
use crate::comm;

/// The key that identifies the shapes of the activations, such as `[batch, seq]` of the tokens of a micro-batch. See
/// [`Stage::shape_key`](super::super::Stage::shape_key).
pub type ShapeKey = [usize; 2];

/// The shape and the dtype of a tensor that is sent between two stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub shape: [usize; 3],
    pub dtype: DType,
}

impl TensorSpec {
    pub fn of(x: &Tensor<3>) -> Self {
        let dtype = match x.dtype() {
            // Engines send it in this type.
            DType::Flex32 => DType::F32,
            dtype => dtype,
        };
        let shape = x.dims();
        Self { shape, dtype }
    }
}

impl fmt::Display for TensorSpec {
    /// Formats the shape and the dtype, for example as `[2, 16, 64] of f32`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.shape, self.dtype.name())
    }
}

/// The cache of the activation shapes that the ranks of a pipeline have recorded from earlier micro-batches. Clones
/// share the cache.
///
/// The first activation of a [key](ShapeKey) between two stages is preceded by a header with its shape and dtype. Later
/// activations with this key must have the same shape and dtype. On each rank, pass the same cache to all runs of a
/// pipeline. Then a shape is either in the caches of all ranks or in none.
#[derive(Clone, Debug, Default)]
pub struct ShapeCache(Arc<Mutex<HashMap<(usize, ShapeKey), TensorSpec>>>);

impl ShapeCache {
    /// Returns the shape and dtype of the activation that a stage returns for micro-batches with this key, or `None` if
    /// the cache does not contain them.
    pub(super) fn get(&self, stage: usize, key: ShapeKey) -> Option<TensorSpec> {
        self.0.lock().get(&(stage, key)).copied()
    }

    pub(super) fn insert(&self, stage: usize, key: ShapeKey, spec: TensorSpec) {
        self.0.lock().insert((stage, key), spec);
    }
}

/// The header that is sent before the first activation of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorMetadata {
    pub stage: usize,
    pub micro_batch: usize,
    pub key: ShapeKey,
    pub spec: TensorSpec,
}

impl TensorMetadata {
    /// The number of integers in the serialized header.
    pub const LEN: usize = 8;

    pub fn to_numbers(self) -> Vec<i64> {
        let wire = wire_dtype(self.spec.dtype);
        let dtype = comm::DType::ALL.into_iter().position(|dtype| dtype == wire);
        let [rows, seq] = self.key;
        let [batch, len, hidden] = self.spec.shape;
        let numbers = [
            self.stage,
            self.micro_batch,
            rows,
            seq,
            batch,
            len,
            hidden,
            dtype.expect("the list has all types"),
        ];
        numbers.map(|number| number as i64).to_vec()
    }

    /// Parses the header. Returns `None` for invalid numbers.
    pub fn from_numbers(numbers: &[i64]) -> Option<Self> {
        let number = |i: usize| usize::try_from(*numbers.get(i)?).ok();
        let dtype = *comm::DType::ALL.get(number(7)?)?;
        Some(Self {
            stage: number(0)?,
            micro_batch: number(1)?,
            key: [number(2)?, number(3)?],
            spec: TensorSpec {
                shape: [number(4)?, number(5)?, number(6)?],
                dtype: float_type(dtype)?,
            },
        })
    }
}

/// Returns the tensor type that is sent as this wire type.
fn float_type(wire: comm::DType) -> Option<DType> {
    match wire {
        comm::DType::F64 => Some(DType::F64),
        comm::DType::F32 => Some(DType::F32),
        comm::DType::BF16 => Some(DType::BF16),
        comm::DType::F16 => Some(DType::F16),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_are_read_as_they_are_written() {
        let float = [DType::F64, DType::F32, DType::BF16, DType::F16];
        for (i, dtype) in float.into_iter().enumerate() {
            let shape = [2, 3 + i, 4];
            let metadata = TensorMetadata {
                stage: 1,
                micro_batch: 7,
                key: [2, 6],
                spec: TensorSpec { shape, dtype },
            };
            let numbers = metadata.to_numbers();
            assert_eq!(numbers.len(), TensorMetadata::LEN);
            assert_eq!(TensorMetadata::from_numbers(&numbers), Some(metadata));
            // An integer type is not valid for an activation, and neither is a negative size.
            let with = |at: usize, number: i64| {
                let mut numbers = numbers.clone();
                numbers[at] = number;
                TensorMetadata::from_numbers(&numbers)
            };
            assert_eq!(with(7, 4), None);
            assert_eq!(with(7, 99), None);
            assert_eq!(with(4, -1), None);
            assert_eq!(TensorMetadata::from_numbers(&numbers[1..]), None);
        }
    }
}
