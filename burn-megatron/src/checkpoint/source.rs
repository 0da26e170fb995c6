//! Sources of the tensors of a complete model. A source is read slice by slice.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::{CheckpointError, TensorSlice};

/// The element type of a saved tensor. It is displayed as in a manifest, for example `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[derive(strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum ElementType {
    /// 64-bit floating point.
    F64,
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point (IEEE half precision).
    F16,
    /// bfloat16: 16-bit floating point with the exponent range of `f32`.
    Bf16,
    /// 64-bit signed integer.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 8-bit unsigned integer.
    U8,
}

impl ElementType {
    /// Returns the size of an element in bytes.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// Returns the corresponding dtype of Burn.
    pub fn dtype(self) -> DType {
        match self {
            Self::F64 => DType::F64,
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
            Self::I64 => DType::I64,
            Self::I32 => DType::I32,
            Self::U8 => DType::U8,
        }
    }

    /// Returns the element type of a Burn dtype, or `None` if it cannot be saved.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F64 => Some(Self::F64),
            DType::F32 | DType::Flex32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            DType::I64 => Some(Self::I64),
            DType::I32 => Some(Self::I32),
            DType::U8 => Some(Self::U8),
            _ => None,
        }
    }
}

/// The key, element type and shape of a saved tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMeta {
    /// The key of the tensor, such as `model/blocks.0.mlp.up.weight`.
    pub key: String,
    /// The element type.
    pub dtype: ElementType,
    /// The shape of the tensor in the complete model, without padding.
    pub shape: Vec<usize>,
}

impl TensorMeta {
    /// Returns the size of the complete tensor in bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::TooLarge`] if the size overflows.
    pub fn bytes(&self) -> Result<usize, CheckpointError> {
        self.slice_bytes(&TensorSlice::whole(&self.shape))
    }

    /// Returns the size of a slice of the tensor in bytes.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::OutOfBounds`] if the tensor does not contain the slice, [`CheckpointError::TooLarge`]
    /// if the size overflows.
    pub fn slice_bytes(&self, slice: &TensorSlice) -> Result<usize, CheckpointError> {
        CheckpointError::check_bounds(&self.key, &self.shape, slice)?;
        let mut sizes = slice.shape.iter().copied();
        let bytes = sizes.try_fold(self.dtype.size(), usize::checked_mul);
        bytes.ok_or_else(|| CheckpointError::TooLarge {
            key: self.key.clone(),
            shape: self.shape.clone(),
        })
    }
}

/// A source of the tensors of a complete model, such as a checkpoint or a model folder of another library. The tensors
/// have the names and shapes of this library.
pub trait TensorSource: Send + Sync {
    /// Returns the name of the source for messages, such as its path.
    fn name(&self) -> String;

    /// Returns the keys of all tensors, sorted.
    fn keys(&self) -> Vec<String>;

    /// Returns the type and shape of a tensor, or `None` if the key is unknown.
    fn tensor(&self, key: &str) -> Option<TensorMeta>;

    /// Returns the elements of a slice of a tensor in row-major order and little-endian. The elements have the type of
    /// the saved tensor. Only the necessary data is read.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] for an unknown tensor, a slice outside its tensor, and failed reads.
    fn read(&self, key: &str, slice: &TensorSlice) -> Result<Vec<u8>, CheckpointError>;

    /// Reads a slice like [`Self::read`] into existing memory, which must have the size of the slice.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::read`], and [`CheckpointError::Length`] if the memory does not have the slice's
    /// size.
    fn read_into(
        &self,
        key: &str,
        slice: &TensorSlice,
        to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let bytes = self.read(key, slice)?;
        check_length(key, slice, bytes.len(), to.len())?;
        to.copy_from_slice(&bytes);
        Ok(())
    }
}

/// Checks the number of bytes of a slice.
pub(super) fn check_length(
    key: &str,
    slice: &TensorSlice,
    found: usize,
    wanted: usize,
) -> Result<(), CheckpointError> {
    if found == wanted {
        Ok(())
    } else {
        Err(CheckpointError::Length {
            key: key.into(),
            slice: slice.clone(),
            found,
            wanted,
        })
    }
}
