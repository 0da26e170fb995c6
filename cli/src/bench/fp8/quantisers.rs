//! Both copies of a matrix.

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::kernels::fp8::Format;

use super::recipe::{Both, Recipe};
use super::{Contest, draw, repeated};
use crate::bench::case::Shape;

pub fn contest(
    recipe: Recipe,
    square: bool,
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> Contest {
    let x = draw([shape.rows, shape.width], device, dtype);
    let scale = Tensor::<1>::ones([1], device);
    let run = move || recipe.quantize(x.clone(), Format::E4M3, square, &scale);
    // The scale of the whole matrix is only known when all of it was read.
    let reads = if recipe == Recipe::Current { 2 } else { 1 };
    let written = Both::of(run()).bytes();
    Contest {
        direction: "both ways",
        bytes: reads * shape.elements() * dtype.size() + written,
        fused: repeated(run),
        plain: None,
    }
}
