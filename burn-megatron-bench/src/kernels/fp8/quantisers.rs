//! Quantisation of a matrix, row-wise and column-wise.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::kernels::fp8::Format;

use super::recipe::{BothLayouts, ScalingRecipe};
use super::{TimedPair, draw, repeated};
use burn_megatron_cli::internal::Shape;

pub fn pair(
    recipe: ScalingRecipe,
    square: bool,
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> TimedPair {
    let x = draw([shape.rows, shape.width], device, dtype);
    let scale = Tensor::<1>::ones([1], device);
    let run = move || recipe.quantize(x.clone(), Format::E4M3, square, &scale);
    // The scale of the whole matrix needs a first pass over it.
    let reads = if recipe == ScalingRecipe::Current {
        2
    } else {
        1
    };
    let written = BothLayouts::of(run()).bytes();
    TimedPair {
        direction: "both usage",
        bytes: reads * shape.elements() * dtype.size() + written,
        fused: repeated(run),
        plain: None,
    }
}
