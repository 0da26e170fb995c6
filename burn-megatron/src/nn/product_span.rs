//! Spans of the matrix products of linear layers, with their floating-point operations.
//!
//! `MatmulClock` of `burn-megatron-comm-testing` reads them.

use burn::tensor::Tensor;
use tracing::span::EnteredSpan;

/// Records that the product of `[rows, k]` and `[k, n]` is computed, or of their likes in the backward.
pub(super) fn product_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("product", flops = (2 * rows * k * n) as u64).entered()
}

/// The same of the product of a weight gradient.
pub(super) fn weight_gradient_span(x: &Tensor<2>, n: usize) -> EnteredSpan {
    let [rows, k] = x.dims();
    tracing::trace_span!("weight_gradient", flops = (2 * rows * k * n) as u64).entered()
}
