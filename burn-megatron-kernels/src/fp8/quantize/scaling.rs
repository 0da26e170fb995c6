//! The methods of scaling, and the copies that are computed.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales, mx_words};
use crate::launch::Spec;

/// The method of scaling.
#[derive(Clone, Debug)]
pub enum Scaling {
    /// One for the whole matrix, given: the factor of the values before they are encoded, `[1]` in
    /// f32, a normal number above 0.
    Tensor(Tensor<1>),
    /// The same, an element of the scales of many matrices.
    Element {
        /// `[count]` in f32.
        scales: Tensor<1>,
        /// Which of them.
        index: usize,
    },
    /// One for 128 elements of a row (or of a column, for the columnwise copy).
    Blocks {
        /// Whether 128 rows share it too, so that both copies have the same codes.
        square: bool,
        /// Whether scales are rounded down to powers of two.
        power_of_two: bool,
    },
    /// One E8M0 for 32 elements of a row (or of a column).
    Mx,
}

/// Which copies are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QuantizerUsage {
    /// `[rows, columns]`: a product sums over the columns.
    pub rowwise: bool,
    /// `[columns, rows]`: a product sums over the rows.
    pub columnwise: bool,
}

impl QuantizerUsage {
    /// Both copies.
    pub const BOTH: Self = Self {
        rowwise: true,
        columnwise: true,
    };
    /// The rowwise copy.
    pub const ROWWISE: Self = Self {
        rowwise: true,
        columnwise: false,
    };
    /// The columnwise copy.
    pub const COLUMNWISE: Self = Self {
        rowwise: false,
        columnwise: true,
    };
}

/// The rule by which the scale follows from the largest magnitude of a tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CurrentScale {
    /// The least magnitude that is taken for the largest one: 0 or more.
    pub epsilon: f32,
    /// Whether the scale is rounded down to a power of two.
    pub power_of_two: bool,
}

/// [`Scaling`] without its tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScalingKind {
    Tensor,
    Blocks { square: bool, power_of_two: bool },
    Mx,
}

impl ScalingKind {
    /// The kind of this scaling.
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

    /// The kind of scales of this matrix.
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

    /// Whether both copies have the same codes, one the transposed of the other.
    pub(super) fn shares_codes(self) -> bool {
        match self {
            Self::Tensor => true,
            Self::Blocks { square, .. } => square,
            Self::Mx => false,
        }
    }

    /// Rows that share a scale.
    pub(super) fn height(self) -> usize {
        match self {
            Self::Blocks { square: true, .. } => BLOCK,
            _ => 1,
        }
    }

    /// Rows of scales for `rows` rows that begin with a block; none if the scale is given.
    pub(super) fn scale_rows(self, rows: usize) -> usize {
        match self {
            Self::Tensor => 0,
            _ => rows.div_ceil(self.height()),
        }
    }

    /// The tensor of scales with its meaning.
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
