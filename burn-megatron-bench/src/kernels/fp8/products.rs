//! The FP8 matrix multiplications of a linear layer. The time to quantize the matrices is not measured.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_megatron::kernels::fp8::{Accumulation, Format, accumulate_at, multiply};
use burn_megatron_cli::internal::Shape;

use super::recipe::ScalingRecipe;
use crate::kernels::pairs::{TimedPair, draw, linear_layer, repeated, with_sums};

/// Returns `y = x w` as forward, and `dx = dy w^T` and `dw += x^T dy` as backward. `x` and `dy` have the shape
/// `[rows, width]`, and `w` has the shape `[width, width]`. `dw` is accumulated in f32.
pub fn pairs(
    recipe: ScalingRecipe,
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> Vec<TimedPair> {
    let Shape { rows, width } = *shape;
    let scale = Tensor::<1>::ones([1], device);
    let x = draw([rows, width], device, dtype);
    let dy = draw([rows, width], device, dtype);
    let weight = draw([width, width], device, dtype);
    let both = |x: &Tensor<2>, format, square| recipe.quantize(x.clone(), format, square, &scale);
    let x8 = both(&x, Format::E4M3, false);
    let w8 = both(&weight, Format::E4M3, true);
    let dy8 = both(&dy, recipe.of_gradients(), false);
    let float = FloatDType::from(dtype);
    let (of_x, of_w) = (shape.elements(), width * width);
    let [forward, backward] = linear_layer(&x, &weight, &dy);
    vec![
        TimedPair {
            direction: "forward",
            bytes: of_x + of_w + of_x * dtype.size(),
            fused: repeated((x8.rowwise, w8.columnwise), move |(x, w)| {
                multiply(&x, &w, None, float, Accumulation::Fast)
            }),
            plain: Some(forward),
        },
        TimedPair {
            direction: "backward",
            // Both multiplications read dy. The accumulated gradients are read and written.
            bytes: 3 * of_x + of_w + of_x * dtype.size() + 8 * of_w,
            fused: with_sums(
                of_w,
                device,
                (x8.columnwise, w8.rowwise, dy8),
                move |(x, w, dy), sums| {
                    let dx = multiply(&dy.rowwise, &w, None, float, Accumulation::Exact);
                    (dx, accumulate_at(&x, &dy.columnwise, sums, 0, true))
                },
            ),
            plain: Some(backward),
        },
    ]
}
