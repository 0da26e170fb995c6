//! A matrix in 8 bits with its scales.

use burn::backend::DispatchTensor;
use burn::tensor::{Int, Tensor};

use super::Format;

/// Codes of one row end at a multiple of so many bytes, which FP8 products of GPUs ask for.
pub const ROW_BYTES: usize = 16;

/// Elements that share a scale along the depth of a blockwise matrix.
pub const BLOCK: usize = 128;

/// Elements that share a scale in MXFP8.
pub const MX_BLOCK: usize = 32;

/// A matrix `[rows, depth]` in 8 bits, as a product reads it: what is summed over lies along each row.
///
/// A code times its scale is the value. Rows end at a multiple of [`ROW_BYTES`]; what is there beyond
/// the depth is zeros, which add nothing to a product.
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// `[rows, words]` of u32, four codes in each, the first in the lowest bits;
    /// `words = 4 ceil(depth / 16)`.
    pub codes: Tensor<2, Int>,
    /// What the codes are multiplied with.
    pub scales: Scales,
    /// The format of the codes: E4M3 or E5M2.
    pub format: Format,
    /// What is summed over.
    pub depth: usize,
}

/// What codes are multiplied with to be values.
#[derive(Clone, Debug)]
pub enum Scales {
    /// One for all: `[1]` in f32.
    Tensor(Tensor<1>),
    /// `[ceil(rows / height), ceil(depth / 128)]` in f32.
    Blocks {
        /// The scales.
        scales: Tensor<2>,
        /// Rows that share a scale: 1 or [`BLOCK`].
        height: usize,
    },
    /// One E8M0 for each [`MX_BLOCK`] elements of a row, four in a u32: `[rows, words]` with
    /// `words = ceil(ceil(depth / 32) / 4)`.
    Mx(Tensor<2, Int>),
}

impl Fp8Matrix {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.codes.dims()[0]
    }

    /// Codes and scales, to be kept for a backward; [`with_tensors`](Self::with_tensors) is the way
    /// back.
    pub fn tensors(&self) -> [DispatchTensor; 2] {
        let scales = match &self.scales {
            Scales::Tensor(scale) => scale.clone().into_dispatch(),
            Scales::Blocks { scales, .. } => scales.clone().into_dispatch(),
            Scales::Mx(scales) => scales.clone().into_dispatch(),
        };
        [self.codes.clone().into_dispatch(), scales]
    }

    /// The matrix with other codes and scales of the same kinds and sizes, as [`tensors`](Self::tensors)
    /// gives them.
    pub fn with_tensors(&self, [codes, scales]: [DispatchTensor; 2]) -> Self {
        let scales = match &self.scales {
            Scales::Tensor(_) => Scales::Tensor(Tensor::from_dispatch(scales)),
            Scales::Blocks { height, .. } => Scales::Blocks {
                scales: Tensor::from_dispatch(scales),
                height: *height,
            },
            Scales::Mx(_) => Scales::Mx(Tensor::from_dispatch(scales)),
        };
        Self {
            codes: Tensor::from_dispatch(codes),
            scales,
            ..self.clone()
        }
    }

    /// The bytes that it takes, scales included.
    pub fn bytes(&self) -> usize {
        let scales = match &self.scales {
            Scales::Tensor(_) => 4,
            Scales::Blocks { scales, .. } => 4 * scales.shape().num_elements(),
            Scales::Mx(scales) => 4 * scales.shape().num_elements(),
        };
        4 * self.codes.shape().num_elements() + scales
    }
}

/// The u32 words of a row of `depth` codes.
pub(crate) const fn words(depth: usize) -> usize {
    depth.div_ceil(ROW_BYTES) * (ROW_BYTES / 4)
}

/// The u32 words of the E8M0 scales of a row of `depth` codes.
pub(crate) const fn mx_words(depth: usize) -> usize {
    depth.div_ceil(MX_BLOCK).div_ceil(4)
}
