//! Tracing spans of the matmuls of linear layers, with their numbers of floating-point operations.
//!
//! `MatmulClock` of `burn-megatron-comm-testing` reads the spans.

use burn::tensor::Tensor;
use tracing::span::EnteredSpan;

/// Enters the span of the matmul of `[rows, k]` and `[k, n]`, or of a matmul of the same size in the backward pass.
pub(super) fn product_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("product", flops = (2 * rows * k * n) as u64).entered()
}

/// Enters the span of the matmul of a weight gradient.
pub(super) fn weight_gradient_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("weight_gradient", flops = (2 * rows * k * n) as u64).entered()
}
