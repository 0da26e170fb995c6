//! FP8: 8-bit floating-point formats, quantizers, and multiplication of quantized matrices.
//!
//! A linear layer that trains in FP8 computes three matrix multiplications. Each of them sums over a different
//! dimension of its operands. [`quantize`] reads a matrix once and writes up to two quantized copies for these
//! multiplications. The rowwise copy has the layout of the matrix, and multiplications sum over its columns. The
//! columnwise copy is the transposed matrix. [`multiply`] and [`accumulate_at`] multiply two quantized matrices.
//!
//! ```text
//! y  = x w        x rowwise    [tokens, in]   w columnwise [out, in]
//! dx = dy w^T     dy rowwise   [tokens, out]  w rowwise    [in, out]
//! dw = x^T dy     x columnwise [in, tokens]   dy columnwise [out, tokens]
//! ```
//!
//! The formulas follow Transformer Engine. The operations are not differentiable: autodiff does not record them.

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
