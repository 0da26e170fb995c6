//! 8-bit floats: formats, quantisers, and products of quantised matrices.
//!
//! A linear layer that trains in 8 bits computes three products. Each product sums over a different dimension of its
//! factors. [`quantize`] reads a matrix once and writes the copies for these products: rowwise (as it is, summed over
//! the columns) and columnwise (transposed). [`multiply`] and [`accumulate_at`] multiply two such matrices.
//!
//! ```text
//! y  = x w        x rowwise    [tokens, in]   w columnwise [out, in]
//! dx = dy w^T     dy rowwise   [tokens, out]  w rowwise    [in, out]
//! dw = x^T dy     x columnwise [in, tokens]   dy columnwise [out, tokens]
//! ```
//!
//! The formulas follow Transformer Engine. The operations are not differentiable: nothing is
//! recorded for autodiff.

mod check;
pub(crate) mod codec;
pub(crate) mod delayed;
mod format;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
pub(crate) mod matrix;
pub(crate) mod product;
pub(crate) mod quantize;
mod statistics;

pub use codec::{decode, decode_scales, encode, encode_scales};
pub use delayed::{
    LOG_COLUMNS, NextScales, ScaleRule, ScaleRules, empty_log, log_magnitude, next_scales,
};
pub use format::{Format, Rounding, e8m0};
pub use matrix::{BLOCK, Fp8Matrix, MX_BLOCK, ROW_BYTES, Scales};
pub use product::{Accumulation, accumulate_at, engine_of_fp8, library_scales, multiply};
pub use quantize::{
    CurrentScale, Quantized, QuantizerInput, QuantizerUsage, Scaling, amax, current_scale,
    dequantize, quantize, quantize_logged,
};
pub use statistics::{Statistics, statistics};
