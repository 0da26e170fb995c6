//! Tensors of a whole model that can be read box by box, wherever they come from.

use std::fmt;

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::{CheckpointError, Slice};

/// The type of the elements of a saved tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// 64-bit floats.
    F64,
    /// 32-bit floats.
    F32,
    /// 16-bit floats of IEEE.
    F16,
    /// 16-bit floats with the range of f32.
    Bf16,
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// Bytes.
    U8,
}

impl ElementType {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        self.dtype().size()
    }

    /// The type as Burn names it.
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

    /// The type of Burn's, if it can be saved.
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

/// As in a manifest: `f32`.
impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::U8 => "u8",
        })
    }
}

/// What is known of a saved tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorMeta {
    /// Its name in the whole model, such as `model/blocks.0.mlp.up.weight`.
    pub key: String,
    /// The type of its elements.
    pub dtype: ElementType,
    /// Its shape in the whole model, without padding.
    pub shape: Vec<usize>,
}

impl TensorMeta {
    /// The bytes of all of it, if they can be counted.
    pub fn bytes(&self) -> Option<usize> {
        self.bytes_of(&Slice::whole(&self.shape))
    }

    /// The bytes of a box of it, if they can be counted.
    pub fn bytes_of(&self, slice: &Slice) -> Option<usize> {
        let sizes = slice.shape.iter();
        sizes
            .copied()
            .try_fold(self.dtype.size(), usize::checked_mul)
    }
}

/// Tensors of a whole model, in the layout of this library: a checkpoint, or a folder of another
/// library that is read as one.
pub trait TensorSource: Send + Sync {
    /// What it is, for messages: a path.
    fn name(&self) -> String;

    /// The keys of all tensors, sorted.
    fn keys(&self) -> Vec<String>;

    /// What is known of a tensor.
    fn tensor(&self, key: &str) -> Option<TensorMeta>;

    /// The elements of a box of a tensor, in row-major order and little-endian, in the tensor's own type.
    /// No more is read than needed.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`] for a tensor that is not there, a box that does not fit, and what cannot be
    /// read.
    fn read(&self, key: &str, slice: &Slice) -> Result<Vec<u8>, CheckpointError>;

    /// [`Self::read`] into memory that is there, as long as the box.
    ///
    /// # Errors
    ///
    /// Those of [`Self::read`], and [`CheckpointError::Length`] for more or fewer bytes than the box has.
    fn read_into(&self, key: &str, slice: &Slice, to: &mut [u8]) -> Result<(), CheckpointError> {
        let bytes = self.read(key, slice)?;
        check_length(key, slice, bytes.len(), to.len())?;
        to.copy_from_slice(&bytes);
        Ok(())
    }
}

/// Whether there are as many bytes as are wanted of a box.
pub(super) fn check_length(
    key: &str,
    slice: &Slice,
    found: usize,
    wanted: usize,
) -> Result<(), CheckpointError> {
    match found == wanted {
        true => Ok(()),
        false => Err(CheckpointError::Length {
            key: key.into(),
            slice: slice.clone(),
            found,
            wanted,
        }),
    }
}
