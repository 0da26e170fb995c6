//! The quantisers as device operations.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::super::matrix::{mx_words, words};
use super::super::{BLOCK, Format, Fp8Matrix, Scales};
#[cfg(feature = "cubecl")]
use super::kernel;
use super::{CurrentScale, Scaling, Ways, cpu};
use crate::launch::{DeviceOp, Spec};

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
            Scaling::Tensor(_) => Self::Tensor,
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

    fn spec(self, [rows, depth]: [usize; 2]) -> Spec {
        let wide = depth.div_ceil(BLOCK);
        match self {
            Self::Tensor => Spec::new([1], DType::F32),
            Self::Blocks { .. } => Spec::new([self.scale_rows(rows), wide], DType::F32),
            Self::Mx => Spec::new([rows, mx_words(depth)], DType::U32),
        }
    }
}

/// Inputs: the matrix, and the scale where it is given.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantizeOp {
    pub format: Format,
    pub kind: ScalingKind,
    pub ways: Ways,
}

impl DeviceOp for QuantizeOp {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [rows, columns] = [inputs[0].shape[0], inputs[0].shape[1]];
        let copy = |[rows, depth]: [usize; 2]| {
            [
                Spec::new([rows, words(depth)], DType::U32),
                self.kind.spec([rows, depth]),
            ]
        };
        let mut all = vec![];
        if self.ways.rowwise {
            all.extend(copy([rows, columns]));
        }
        if self.ways.columnwise {
            all.extend(copy([columns, rows]));
        }
        all.push(Spec::new([2], DType::F32));
        all
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::quantize(self, &inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::quantize(self, inputs)
    }
}

/// Input: a matrix.
#[derive(Debug)]
pub(super) struct AmaxOp;

impl DeviceOp for AmaxOp {
    fn name(&self) -> &'static str {
        "amax"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([1], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::amax(&inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::amax(inputs.remove(0))]
    }
}

/// Input: the largest magnitude.
#[derive(Debug)]
pub(super) struct ScaleOp {
    pub format: Format,
    pub options: CurrentScale,
}

impl DeviceOp for ScaleOp {
    fn name(&self) -> &'static str {
        "current_scale"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([1], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::scale_of(self, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::scale_of(self, inputs.remove(0))]
    }
}

/// Inputs: codes and scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct DequantizeOp {
    pub format: Format,
    pub kind: ScalingKind,
    pub depth: usize,
}

impl DeviceOp for DequantizeOp {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([inputs[0].shape[0], self.depth], DType::F32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::dequantize(self, &inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::dequantize(self, inputs)]
    }
}
