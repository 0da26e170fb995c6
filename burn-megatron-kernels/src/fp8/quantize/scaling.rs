//! The scaling methods of quantizers, and the selection of copies.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales, mx_words};
use crate::launch::Spec;

/// The method that determines the scales of a quantized matrix.
#[derive(Clone, Debug)]
pub enum Scaling {
    /// One given scale for the complete matrix, `[1]` in f32. The values are multiplied by the scale before they are
    /// encoded. The scale must be a positive normal number.
    Tensor(Tensor<1>),
    /// One given scale for the complete matrix, stored as an element of a tensor with the scales of many matrices.
    Element {
        /// The tensor of scales, `[count]` in f32.
        scales: Tensor<1>,
        /// The index of the scale in the tensor.
        index: usize,
    },
    /// One scale per 128 elements of a row. In the columnwise copy, one scale per 128 elements of a column.
    Blocks {
        /// Whether blocks have 128 x 128 elements, so that both copies have the same codes. Otherwise blocks have 1 x
        /// 128 elements.
        square: bool,
        /// Whether scales are rounded down to powers of two.
        power_of_two: bool,
    },
    /// One E8M0 scale per 32 elements of a row. In the columnwise copy, one scale per 32 elements of a column.
    Mx,
}

/// Selects the copies that [`quantize`](fn@super::quantize) computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizerUsage {
    /// Whether to compute the rowwise copy, `[rows, columns]`, for multiplications that sum over the columns.
    pub rowwise: bool,
    /// Whether to compute the columnwise copy, `[columns, rows]`, for multiplications that sum over the rows.
    pub columnwise: bool,
}

impl QuantizerUsage {
    /// Both the rowwise and the columnwise copy.
    pub const BOTH: Self = Self {
        rowwise: true,
        columnwise: true,
    };
    /// Only the rowwise copy.
    pub const ROWWISE: Self = Self {
        rowwise: true,
        columnwise: false,
    };
    /// Only the columnwise copy.
    pub const COLUMNWISE: Self = Self {
        rowwise: false,
        columnwise: true,
    };
}

/// Options of [`current_scale`](super::current_scale), which computes a scale from the largest magnitude of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CurrentScale {
    /// The lower bound for the largest magnitude (amax). Smaller magnitudes are replaced by this value. It must be at
    /// least 0.
    pub epsilon: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
}

/// The kind of a [`Scaling`], without its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScalingKind {
    Tensor,
    Blocks { square: bool, power_of_two: bool },
    Mx,
}

impl ScalingKind {
    /// Returns the kind of this scaling.
    pub(super) fn of(scaling: &Scaling) -> Self {
        match *scaling {
            Scaling::Tensor(_) | Scaling::Element { .. } => Self::Tensor,
            Scaling::Blocks {
                square,
                power_of_two,
            } => Self::Blocks {
                square,
                power_of_two,
            },
            Scaling::Mx => Self::Mx,
        }
    }

    /// Returns the kind of scales of a matrix.
    pub(super) fn of_matrix(matrix: &Fp8Matrix) -> Self {
        match &matrix.scales {
            Scales::Tensor(_) => Self::Tensor,
            Scales::Blocks { height, .. } => Self::Blocks {
                square: *height == BLOCK,
                power_of_two: false,
            },
            Scales::Mx(_) => Self::Mx,
        }
    }

    /// Returns whether both copies have the same codes. In this case one copy is the transpose of the other copy.
    pub(super) fn shares_codes(self) -> bool {
        match self {
            Self::Tensor => true,
            Self::Blocks { square, .. } => square,
            Self::Mx => false,
        }
    }

    /// Returns the number of rows that share a scale.
    pub(super) fn height(self) -> usize {
        match self {
            Self::Blocks { square: true, .. } => BLOCK,
            _ => 1,
        }
    }

    /// Returns the number of rows of scales for `rows` rows that start at the first row of a block. Returns 0 if the
    /// scale is given.
    pub(super) fn scale_rows(self, rows: usize) -> usize {
        match self {
            Self::Tensor => 0,
            _ => rows.div_ceil(self.height()),
        }
    }

    /// Creates the scales of this kind from a tensor.
    pub(super) fn scales(self, tensor: DispatchTensor) -> Scales {
        match self {
            Self::Tensor => Scales::Tensor(Tensor::from_dispatch(tensor)),
            Self::Blocks { .. } => Scales::Blocks {
                scales: Tensor::from_dispatch(tensor),
                height: self.height(),
            },
            Self::Mx => Scales::Mx(Tensor::<2, Int>::from_dispatch(tensor)),
        }
    }

    pub(super) fn spec(self, [rows, depth]: [usize; 2]) -> Spec {
        let wide = depth.div_ceil(BLOCK);
        match self {
            Self::Tensor => Spec::new([1], DType::F32),
            Self::Blocks { .. } => Spec::new([self.scale_rows(rows), wide], DType::F32),
            Self::Mx => Spec::new([rows, mx_words(depth)], DType::U32),
        }
    }
}
