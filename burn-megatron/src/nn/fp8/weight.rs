//! Weights in 8 bits.

use std::fmt::Debug;

use burn::tensor::Tensor;
use burn_megatron_kernels::fp8::{Format, Fp8Matrix};

/// Both copies of a weight `[in, out]`.
#[derive(Clone, Debug)]
pub struct QuantizedWeight {
    /// `[in, out]`, for the gradient of the input.
    pub rowwise: Fp8Matrix,
    /// `[out, in]`, for the output.
    pub columnwise: Fp8Matrix,
}

/// How the weight of one layer becomes 8 bits: what a store that gathers weights in 8 bits has to know.
pub trait WeightQuantizer: Debug + Send + Sync {
    /// The format of the codes.
    fn format(&self) -> Format;

    /// Whether the weight has one scale, which all ranks that hold a part of it must share.
    fn has_one_scale(&self) -> bool;

    /// What values are multiplied with, `[1]` in f32, for a weight whose largest magnitude on all of
    /// these ranks is `amax`, `[1]` in f32. That magnitude is kept for the history. Only where the weight
    /// has one scale.
    fn scale(&self, amax: Tensor<1>) -> Tensor<1>;

    /// Both copies of this tensor rank's part of the weight, `[in, out]`. Where the weight has one scale,
    /// the ranks of the tensor axis must all come.
    fn quantize(&self, weight: Tensor<2>) -> QuantizedWeight;
}
