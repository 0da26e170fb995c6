//! Tracing spans of the matrix products of linear layers, with their floating-point operations.
//!
//! `MatmulClock` of `burn-megatron-comm-testing` reads the spans.

use burn::tensor::Tensor;
use tracing::span::EnteredSpan;

/// Enters the span of the product of `[rows, k]` and `[k, n]`, or of a product of the same size in the backward.
pub(super) fn product_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("product", flops = (2 * rows * k * n) as u64).entered()
}

/// Enters the span of the product of a weight gradient.
pub(super) fn weight_gradient_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("weight_gradient", flops = (2 * rows * k * n) as u64).entered()
}
