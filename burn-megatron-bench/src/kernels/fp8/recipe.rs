//! Quantization of matrices to FP8.

use burn::tensor::Tensor;
use burn_megatron::kernels::fp8::{
    CurrentScale, Format, Fp8Matrix, QuantizerUsage, Scaling, amax, current_scale, quantize,
};

/// The kind of quantization scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingRecipe {
    /// One scale for the whole matrix, which the caller passes.
    Delayed,
    /// One scale for the whole matrix, which is computed from the largest absolute value of the matrix.
    Current,
    /// One scale per 1 x 128 values, or per 128 x 128 values of a weight.
    Blocks,
    /// One scale per 32 values.
    Mx,
}

impl ScalingRecipe {
    /// Returns the format of gradients.
    pub fn of_gradients(self) -> Format {
        match self {
            Self::Delayed | Self::Current => Format::E5M2,
            Self::Blocks | Self::Mx => Format::E4M3,
        }
    }

    /// Quantizes a matrix in both layouts. `given` is the scale of [`Delayed`](Self::Delayed).
    pub fn quantize(
        self,
        x: Tensor<2>,
        format: Format,
        square: bool,
        given: &Tensor<1>,
    ) -> BothLayouts {
        let scaling = match self {
            Self::Delayed => Scaling::Tensor(given.clone()),
            Self::Current => {
                let options = CurrentScale::default();
                Scaling::Tensor(current_scale(amax(x.clone()), format, options))
            }
            Self::Blocks => Scaling::Blocks {
                square,
                power_of_two: true,
            },
            Self::Mx => Scaling::Mx,
        };
        let quantized = quantize(x, format, &scaling, QuantizerUsage::BOTH);
        match (quantized.rowwise, quantized.columnwise) {
            (Some(rowwise), Some(columnwise)) => BothLayouts {
                rowwise,
                columnwise,
            },
            _ => unreachable!("both copies were asked for"),
        }
    }
}

/// A quantized matrix in both layouts.
#[derive(Clone)]
pub struct BothLayouts {
    /// The layout for matrix multiplications that sum over the columns.
    pub rowwise: Fp8Matrix,
    /// The layout for matrix multiplications that sum over the rows.
    pub columnwise: Fp8Matrix,
}
