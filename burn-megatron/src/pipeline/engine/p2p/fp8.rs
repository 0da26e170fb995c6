//! Encodes a tensor in FP8 as one message, which contains the codes of all rows, followed by their scales.

use burn::tensor::{FloatDType, Int, Tensor};
use burn_megatron_kernels::bits;
use burn_megatron_kernels::fp8::{
    BLOCK, Format, Fp8Matrix, QuantizerUsage, ROW_BYTES, Scales, Scaling, dequantize, quantize,
};

use super::shapes::TensorSpec;

/// The scaling: each block of values in a row has its own scale.
const SCALING: Scaling = Scaling::Blocks {
    square: false,
    power_of_two: false,
};

/// Returns the sizes of a tensor as a matrix: the number of rows, of code words per row, and of scales per row.
fn sizes([batch, seq, hidden]: [usize; 3]) -> [usize; 3] {
    let words = hidden.next_multiple_of(ROW_BYTES) / size_of::<u32>();
    [batch * seq, words, hidden.div_ceil(BLOCK)]
}

/// Returns the length of a message in words.
pub fn words(shape: [usize; 3]) -> usize {
    let [rows, words, scales] = sizes(shape);
    rows * (words + scales)
}

/// Encodes a tensor as a message, `[words]` of u32.
pub fn encode(x: Tensor<3>) -> Tensor<1, Int> {
    let shape = x.dims();
    let [rows, words, scales] = sizes(shape);
    let x = x.reshape([rows, shape[2]]);
    let quantized = quantize(x, Format::E4M3, &SCALING, QuantizerUsage::ROWWISE);
    let Some(Fp8Matrix {
        codes,
        scales: Scales::Blocks {
            scales: factors, ..
        },
        ..
    }) = quantized.rowwise
    else {
        unreachable!("a quantizer returns the copy that was asked for")
    };
    let factors = bits::as_u32(factors.reshape([rows * scales]));
    Tensor::cat(vec![codes.reshape([rows * words]), factors], 0)
}

/// Decodes the tensor of a message.
pub fn decode(message: Tensor<1, Int>, TensorSpec { shape, dtype }: TensorSpec) -> Tensor<3> {
    let [rows, words, scales] = sizes(shape);
    let codes = message.clone().narrow(0, 0, rows * words);
    let factors = message.narrow(0, rows * words, rows * scales);
    let values = dequantize(&Fp8Matrix {
        codes: codes.reshape([rows, words]),
        scales: Scales::Blocks {
            scales: bits::as_f32(factors).reshape([rows, scales]),
            height: 1,
        },
        format: Format::E4M3,
        depth: shape[2],
    });
    values.cast(FloatDType::from(dtype)).reshape(shape)
}
