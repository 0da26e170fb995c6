//! Rows in 8 bits: E4M3 codes with a scale for each 128 features, as DeepEP sends them.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::bits;
use burn_megatron_kernels::fp8::{
    BLOCK, Format, Fp8Matrix, QuantizerUsage, ROW_BYTES, Rounding, Scales, Scaling, decode_scales,
    dequantize, encode_scales, quantize,
};
use serde::{Deserialize, Serialize};

use crate::collective::{Comm, PendingPacked, start_all_to_all_packed};

/// The type of the scales of a dispatch in 8 bits: one for each 128 features of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8DispatchScales {
    /// In f32: the largest feature of a block becomes the largest number of E4M3.
    F32,
    /// Powers of two, in 8 bits (`ue8m0` of DeepEP).
    E8m0,
}

impl Fp8DispatchScales {
    /// The bytes of a row of so many features: a code each up to a multiple of 16, and the scales, of E8M0 up to a multiple
    /// of 4.
    pub fn row_bytes(self, hidden: usize) -> usize {
        4 * (code_words(hidden) + self.scale_words(hidden))
    }

    fn scale_words(self, hidden: usize) -> usize {
        let blocks = hidden.div_ceil(BLOCK);
        match self {
            Self::F32 => blocks,
            Self::E8m0 => blocks.div_ceil(4),
        }
    }

    /// Codes and scales of `x`, `[rows, hidden]`, in one row of u32 each: `[rows * words]`.
    fn packed(self, x: Tensor<2>) -> Tensor<1, Int> {
        let [rows, hidden] = x.dims();
        let x = match x.dtype() {
            DType::F64 => x.cast(FloatDType::F32),
            _ => x,
        };
        let scaling = Scaling::Blocks {
            square: false,
            power_of_two: self == Self::E8m0,
        };
        let quantized = quantize(x, Format::E4M3, &scaling, QuantizerUsage::ROWWISE);
        let Some(Fp8Matrix {
            codes,
            scales: Scales::Blocks { scales, .. },
            ..
        }) = quantized.rowwise
        else {
            unreachable!("a quantiser gives the copy that it is asked for, with scales of its kind")
        };
        let scales = self.words_of(scales);
        let words = code_words(hidden) + self.scale_words(hidden);
        Tensor::cat(vec![codes, scales], 1).reshape([rows * words])
    }

    /// `[rows, blocks]` in f32 to `[rows, words]` of u32.
    fn words_of(self, scales: Tensor<2>) -> Tensor<2, Int> {
        let [rows, blocks] = scales.dims();
        match self {
            Self::F32 => bits::as_u32(scales.reshape([rows * blocks])).reshape([rows, blocks]),
            Self::E8m0 => {
                let words = blocks.div_ceil(4);
                let scales = match 4 * words - blocks {
                    0 => scales,
                    more => Tensor::cat(
                        vec![
                            scales.clone(),
                            Tensor::ones([rows, more], (&scales.device(), DType::F32)),
                        ],
                        1,
                    ),
                };
                let flat = scales.reshape([rows * 4 * words]);
                encode_scales(flat, Rounding::Nearest).reshape([rows, words])
            }
        }
    }

    /// The reverse of [`words_of`](Self::words_of).
    fn scales_of(self, words: Tensor<2, Int>, blocks: usize) -> Tensor<2> {
        let [rows, width] = words.dims();
        let flat = words.reshape([rows * width]);
        match self {
            Self::F32 => bits::as_f32(flat).reshape([rows, blocks]),
            Self::E8m0 => {
                let scales = decode_scales(flat, rows * 4 * width).reshape([rows, 4 * width]);
                scales.narrow(1, 0, blocks)
            }
        }
    }
}

fn code_words(hidden: usize) -> usize {
    hidden.div_ceil(ROW_BYTES) * (ROW_BYTES / 4)
}

/// Rows of codes under way.
pub(super) struct PendingFp8Rows {
    words: PendingPacked,
    scales: Fp8DispatchScales,
    shape: [usize; 2],
    dtype: DType,
}

impl PendingFp8Rows {
    /// Starts sending `send[r]` rows of `x`, `[rows, hidden]`, to rank `r`, and receiving `receive[r]` from it.
    pub fn start(
        x: Tensor<2>,
        scales: Fp8DispatchScales,
        sizes: [&[usize]; 2],
        comm: &Comm,
    ) -> Self {
        let ([_, hidden], dtype) = (x.dims(), x.dtype());
        let width = code_words(hidden) + scales.scale_words(hidden);
        let words = start_all_to_all_packed(scales.packed(x), width, sizes, comm);
        let shape = [sizes[1].iter().sum(), hidden];
        Self {
            words,
            scales,
            shape,
            dtype,
        }
    }

    /// The received rows, in the type of those that were sent.
    pub fn wait(self) -> Tensor<2> {
        let [rows, hidden] = self.shape;
        let (codes, scales) = (code_words(hidden), self.scales.scale_words(hidden));
        let words = self.words.wait().reshape([rows, codes + scales]);
        let matrix = Fp8Matrix {
            codes: words.clone().narrow(1, 0, codes),
            scales: Scales::Blocks {
                scales: self
                    .scales
                    .scales_of(words.narrow(1, codes, scales), hidden.div_ceil(BLOCK)),
                height: 1,
            },
            format: Format::E4M3,
            depth: hidden,
        };
        dequantize(&matrix).cast(self.dtype)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::comm::SingleRank;

    /// Each block of a row, the last of 44 features, is rounded by its own scale: to 4 digits, or by half of the smallest
    /// number of E4M3, 2^-10, where the largest feature of the block is at least 224 (at most 448).
    #[test]
    fn features_are_rounded_by_the_scale_of_their_block() {
        const HIDDEN: usize = 2 * BLOCK + 44;
        let magnitude = |at: usize| 1000f32.powi((at % HIDDEN / BLOCK + at / HIDDEN) as i32);
        let value = |at: usize| (at as f32 * 0.7).sin() * magnitude(at);
        let all: Vec<f32> = (0..3 * HIDDEN).map(value).collect();
        let comm: Comm = Arc::new(SingleRank::new("all"));
        for (scales, largest) in [
            (Fp8DispatchScales::F32, 448.0),
            (Fp8DispatchScales::E8m0, 224.0),
        ] {
            let data = TensorData::new(all.clone(), [3, HIDDEN]);
            let x = Tensor::<2>::from_data(data, &Device::flex());
            let rows = PendingFp8Rows::start(x, scales, [&[3], &[3]], &comm).wait();
            assert_eq!(rows.dims(), [3, HIDDEN]);
            let found: Vec<f32> = rows.into_data().try_into_vec().unwrap();
            assert_ne!(found, all);
            for (at, (found, exact)) in found.iter().zip(&all).enumerate() {
                let bound = (exact.abs() / 16.0).max(magnitude(at) / (1024.0 * largest));
                assert!(
                    (found - exact).abs() <= bound * 1.0001,
                    "{scales:?} {at}: {found}, not {exact}"
                );
            }
        }
    }
}
