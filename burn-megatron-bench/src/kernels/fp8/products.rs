//! The products of a linear layer; quantising the matrices is not timed.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use burn_megatron::kernels::fp8::{Accumulation, Format, accumulate_at, multiply};
use burn_megatron::kernels::gemm;
use burn_megatron_cli::internal::Shape;

use super::recipe::{BothLayouts, ScalingRecipe};
use crate::kernels::pairs::{TimedPair, draw, repeated, with_sums, zeros};

/// `y = x w` as forward, `dx = dy w^T` and `dw += x^T dy` as backward; `x` and `dy` are
/// `[rows, width]`, `w` `[width, width]`, `dw` is added up in f32.
pub fn pairs(
    recipe: ScalingRecipe,
    shape: &Shape,
    device: &Device,
    dtype: DType,
) -> Vec<TimedPair> {
    let Shape { rows, width } = *shape;
    let scale = Tensor::<1>::ones([1], device);
    let (x, dy) = (
        draw([rows, width], device, dtype),
        draw([rows, width], device, dtype),
    );
    let weight = draw([width, width], device, dtype);
    let both = |x: &Tensor<2>, format, square| {
        BothLayouts::of(recipe.quantize(x.clone(), format, square, &scale))
    };
    let x8 = both(&x, Format::E4M3, false);
    let w8 = both(&weight, Format::E4M3, true);
    let dy8 = both(&dy, recipe.of_gradients(), false);
    let float = FloatDType::from(dtype);
    let (of_x, of_w) = (shape.elements(), width * width);
    let zeros = zeros(of_w, device);
    vec![
        TimedPair {
            direction: "forward",
            bytes: of_x + of_w + of_x * dtype.size(),
            fused: repeated({
                let (x, w) = (x8.rowwise.clone(), w8.columnwise.clone());
                move || multiply(&x, &w, None, float, Accumulation::Fast)
            }),
            plain: Some(repeated({
                let (x, w) = (x.clone(), weight.clone());
                move || gemm::linear(x.clone(), w.clone(), None)
            })),
        },
        TimedPair {
            direction: "backward",
            // dy is read by both; sums are read and written.
            bytes: 3 * of_x + of_w + of_x * dtype.size() + 8 * of_w,
            fused: with_sums(zeros.clone(), {
                let (x, w, dy) = (x8.columnwise, w8.rowwise, dy8);
                move |sums| {
                    let dx = multiply(&dy.rowwise, &w, None, float, Accumulation::Exact);
                    (dx, accumulate_at(&x, &dy.columnwise, sums, 0, true))
                }
            }),
            plain: Some(with_sums(zeros, move |sums| {
                let dx = gemm::linear(dy.clone(), weight.clone().transpose(), None);
                let (x, dy) = (x.clone(), dy.clone());
                let dw = gemm::accumulate_weight_gradient_at(x, dy, sums, 0, true);
                (dx, dw)
            })),
        },
    ]
}
