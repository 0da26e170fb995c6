//! Matrix multiplications as a [`DeviceOp`].

use burn::backend::flex::FlexTensor;
use burn::tensor::DType;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::blas::Blas;
use super::cpu;
use super::engine::{Epilogue, GemmProblem, Matrix};
use crate::cpu::wide;
use crate::launch::{DeviceOp, Spec};

pub(super) const LINEAR: &str = "linear";
pub(super) const WEIGHT_GRADIENT: &str = "accumulate_weight_gradient";
pub(super) const WEIGHT_GRADIENT_AT: &str = "accumulate_weight_gradient_at";

/// A matrix multiplication of the first two inputs. The third input, if any, is a bias or a flat buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GemmOp {
    /// `x weight + bias`. The inputs are `x`, the weight, and an optional bias.
    Linear {
        /// The BLAS library that multiplies on the CPU. With `None`, the `gemm` crate multiplies.
        blas: Option<Blas>,
    },
    /// `x^T gradient`. The inputs are `x`, the gradient, and the flat buffer.
    WeightGradient {
        /// The element of the buffer at which the result begins.
        offset: usize,
        /// Whether the result is added to the existing elements.
        add: bool,
        /// The BLAS library that multiplies on the CPU. With `None`, the `gemm` crate multiplies.
        blas: Option<Blas>,
    },
}

impl GemmOp {
    /// Returns the multiplication of two matrices of type `factors`, with or without a third input.
    pub(super) fn problem(
        self,
        left: Matrix,
        right: Matrix,
        factors: DType,
        has_third: bool,
    ) -> GemmProblem {
        let (result, epilogue) = match self {
            Self::WeightGradient { add, .. } => (wide(factors), Epilogue::Flat { add }),
            Self::Linear { .. } if has_third => (factors, Epilogue::Bias),
            Self::Linear { .. } => (factors, Epilogue::Nothing),
        };
        GemmProblem {
            left,
            right,
            factors,
            result,
            epilogue,
        }
    }

    /// Returns the offset of the result in the third input.
    pub(super) fn offset(self) -> usize {
        match self {
            Self::Linear { .. } => 0,
            Self::WeightGradient { offset, .. } => offset,
        }
    }

    /// Returns the BLAS library that multiplies on the CPU, if it is not the `gemm` crate.
    pub(super) fn blas(self) -> Option<Blas> {
        match self {
            Self::Linear { blas } | Self::WeightGradient { blas, .. } => blas,
        }
    }
}

impl DeviceOp for GemmOp {
    fn name(&self) -> &'static str {
        match self {
            Self::Linear { .. } => LINEAR,
            Self::WeightGradient { .. } => WEIGHT_GRADIENT,
        }
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![match self {
            Self::Linear { .. } => {
                let sizes = [inputs[0].shape[0], inputs[1].shape[1]];
                Spec::new(sizes, inputs[0].dtype)
            }
            Self::WeightGradient { .. } => inputs[2].clone(),
        }]
    }

    /// Transposed matrices are read in place.
    fn strided(&self) -> bool {
        true
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::multiply(*self, inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![super::cube::multiply(*self, inputs)]
    }
}
