//! The quantization of matrices to 8 bits.

use burn::tensor::Tensor;
use burn_megatron::kernels::fp8::{
    CurrentScale, Format, Fp8Matrix, QuantizerUsage, Scaling, amax, current_scale, quantize,
};

/// The method of computing scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalingRecipe {
    /// One, given.
    Delayed,
    /// One, from the largest magnitude of the matrix.
    Current,
    /// One for 1 x 128 values, and for 128 x 128 of a weight.
    Blocks,
    /// One for 32 values.
    Mx,
}

impl ScalingRecipe {
    /// The format of gradients.
    pub fn of_gradients(self) -> Format {
        match self {
            Self::Delayed | Self::Current => Format::E5M2,
            Self::Blocks | Self::Mx => Format::E4M3,
        }
    }

    /// Returns both copies. `given` is the scale of [`Delayed`](Self::Delayed).
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

/// Both copies of a quantised matrix.
#[derive(Clone)]
pub struct BothLayouts {
    /// Summed over its columns.
    pub rowwise: Fp8Matrix,
    /// Summed over its rows.
    pub columnwise: Fp8Matrix,
}
