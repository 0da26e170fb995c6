//! Dispatch of rows in FP8: E4M3 codes with one scale per 128 features, as in DeepEP.

use burn::tensor::{DType, FloatDType, Int, Tensor};
use burn_megatron_kernels::bits;
use burn_megatron_kernels::fp8::{
    BLOCK, Format, Fp8Matrix, QuantizerUsage, ROW_BYTES, Rounding, Scales, Scaling, decode_scales,
    dequantize, encode_scales, quantize,
};
use burn_megatron_kernels::moe::permutation::{RowMap, permute_words};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::collective::{Comm, start_all_to_all_packed};

/// The dtype of the scales of an FP8 dispatch. There is one scale per 128 features of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fp8DispatchScales {
    /// f32 scales, which map the largest magnitude of a block of 128 features to the largest value of E4M3. The scales
    /// are rounded to 20 significant bits. A rank that forwards a row to another rank of its node quantizes the row
    /// again. Because the scales are rounded, the second quantization does not change the row, except for rounding to a
    /// 16-bit dtype of the model.
    F32,
    /// E8M0 scales: powers of two that are stored in 8 bits (`ue8m0` in DeepEP).
    E8m0,
}

/// The number of the 24 significant bits of an f32 scale that are dropped.
const DROPPED_BITS: u32 = 4;

impl Fp8DispatchScales {
    /// Returns the number of bytes of a row with `hidden` features. A row consists of FP8 codes and scales. The codes
    /// take one byte per feature, padded to a multiple of 16 bytes. E8M0 scales are padded to a multiple of 4 bytes.
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

    /// Returns the codes and scales of `x` `[tokens, hidden]`, in rows of u32.
    fn quantized(self, x: Tensor<2>) -> [Tensor<2, Int>; 2] {
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
        [codes, self.words_of(scales)]
    }

    /// Converts f32 scales `[rows, blocks]` to u32 words `[rows, words]`.
    ///
    /// Quantizing a dequantized row again gives the same row, so that a rank can forward a row without changing it.
    /// Powers of two are exact, and f32 scales are rounded to 20 bits here. With such a scale `d`, the multiplication
    /// `q d` is exact for all codes `q`, because `q` has 4 bits and f32 has 24. The largest value of a block is
    /// `448 d`. The quantizer computes `d (1 + e)` from it with `|e| <= 2^-23`, by two divisions. This error is less
    /// than half the distance between adjacent 20-bit numbers, which is above `2^-21`. The scale is therefore rounded
    /// to `d`, and `q (1 + e)` to `q`. Blocks whose largest magnitude is subnormal are an exception.
    fn words_of(self, scales: Tensor<2>) -> Tensor<2, Int> {
        let [rows, blocks] = scales.dims();
        match self {
            Self::F32 => {
                let words = bits::as_u32(scales.reshape([rows * blocks]));
                let half = 1u32 << (DROPPED_BITS - 1);
                let rounded = words
                    .add_scalar(half)
                    .bitwise_and_scalar(u32::MAX << DROPPED_BITS);
                rounded.reshape([rows, blocks])
            }
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

    /// Converts words back to scales, the inverse of [`words_of`](Self::words_of).
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

/// Starts sending `send[r]` rows of the tokens `x` `[tokens, hidden]` to rank `r` in the order of `map`, and receiving
/// `receive[r]` rows from it. Each token is quantized once for all its rows. The rows are written once, in send order.
/// The returned closure waits for the received rows and returns them in the dtype of the sent rows.
pub(super) fn start_fp8_rows(
    x: Tensor<2>,
    scales: Fp8DispatchScales,
    map: &RowMap,
    sizes: [&[usize]; 2],
    comm: &Comm,
) -> impl FnOnce() -> Tensor<2> + Send + use<> {
    let ([_, hidden], dtype) = (x.dims(), x.dtype());
    let (of_codes, of_scales) = (code_words(hidden), scales.scale_words(hidden));
    let width = of_codes + of_scales;
    let [codes, own_scales] = scales.quantized(x);
    let words = permute_words(codes, own_scales, map).reshape([map.rows() * width]);
    let words = start_all_to_all_packed(words, width, sizes, comm);
    let rows: usize = sizes[1].iter().sum();
    move || {
        let words = words.wait().reshape([rows, width]);
        let codes = words.clone().narrow(1, 0, of_codes);
        let words = words.narrow(1, of_codes, of_scales);
        let matrix = Fp8Matrix {
            codes,
            scales: Scales::Blocks {
                scales: scales.scales_of(words, hidden.div_ceil(BLOCK)),
                height: 1,
            },
            format: Format::E4M3,
            depth: hidden,
        };
        dequantize(&matrix).cast(dtype)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::{Device, TensorData};
    use burn_ir::{BaseOperationIr, OperationIr};
    use burn_megatron_kernels::moe::permutation::{RowLayout, permute};
    use burn_megatron_kernels::record::{RecordedStep, ShapeSettings, record};

    use super::*;
    use crate::comm::SingleRank;

    const HIDDEN: usize = 2 * BLOCK + 44;

    /// Rows of magnitudes from 2^-100 to 2^100, and a row of zeros, are bit-identical after a second exchange.
    #[test]
    fn rows_that_are_passed_on_are_not_rounded_again() {
        const ROWS: usize = 400;
        let value = |at: usize| {
            let row = (at / HIDDEN) as i32;
            ((at * at) as f32 * 0.37).sin() * 2f32.powi(row / 2 - 100) * (1.0 + row as f32 / 401.0)
        };
        let mut all: Vec<f32> = (0..ROWS * HIDDEN).map(value).collect();
        all[..HIDDEN].fill(0.0);
        let comm: Comm = Arc::new(SingleRank::new("all"));
        for scales in [Fp8DispatchScales::F32, Fp8DispatchScales::E8m0] {
            let data = TensorData::new(all.clone(), [ROWS, HIDDEN]);
            let x = Tensor::<2>::from_data(data, &Device::flex());
            let to = Tensor::<2, Int>::zeros([ROWS, 1], &Device::flex());
            let map = RowMap::new(to, 1, RowLayout::Rows(ROWS));
            let sizes = [&[ROWS][..], &[ROWS]];
            let pass = |x| start_fp8_rows(x, scales, &map, sizes, &comm)();
            let once = pass(x.clone());
            assert_ne!(once.to_data(), x.into_data());
            assert_eq!(once.to_data(), pass(once).into_data(), "{scales:?}");
        }
    }

    /// Each block of a row is rounded by its own scale, including the last block of 44 features. Features are rounded
    /// to 4 significant bits, or by half of the smallest E4M3 number, 2^-10. The largest feature of a block is encoded
    /// as at least 224 and at most 448.
    #[test]
    fn features_are_rounded_by_the_scale_of_their_block() {
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
            let to = Tensor::<2, Int>::zeros([3, 1], &Device::flex());
            let map = RowMap::new(to, 1, RowLayout::Rows(3));
            let rows = start_fp8_rows(x, scales, &map, [&[3], &[3]], &comm)();
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

    const TOKENS: usize = 5;

    /// One token is sent to three ranks, two tokens to two ranks, and one token to no rank.
    fn destinations(device: &Device) -> Tensor<2, Int> {
        let to = [[0, 1, 2], [2, 0, -1], [-1, 1, -1], [1, 2, -1], [-1, -1, -1]];
        Tensor::from_ints(to, device)
    }

    /// The result is bit-identical to the result of copying the rows first and quantizing each copy separately.
    #[test]
    fn rows_of_a_token_are_those_of_copies_that_are_rounded() {
        let device = Device::flex();
        let comm: Comm = Arc::new(SingleRank::new("all"));
        let values = (0..TOKENS * HIDDEN).map(|at| (at as f32 * 0.7).sin() * 10.0);
        let data = TensorData::new(values.collect::<Vec<_>>(), [TOKENS, HIDDEN]);
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let x = Tensor::<2>::from_data(data.clone(), &device).cast(dtype);
            let map = RowMap::new(destinations(&device), 3, RowLayout::Rows(8));
            let copies = permute(x.clone(), &map);
            let each = RowMap::new(Tensor::zeros([8, 1], &device), 1, RowLayout::Rows(8));
            for scales in [Fp8DispatchScales::F32, Fp8DispatchScales::E8m0] {
                let rows = |x: &Tensor<2>, map| {
                    let sizes = [&[8][..], &[8]];
                    let rows = start_fp8_rows(x.clone(), scales, map, sizes, &comm)();
                    rows.into_data()
                };
                assert_eq!(rows(&x, &map), rows(&copies, &each), "{dtype:?} {scales:?}");
            }
        }
    }

    /// The rounded matrix has one row per token, and one operation writes the rows that are sent.
    #[test]
    fn a_token_is_rounded_once_and_its_rows_are_written_once() {
        const ROWS: usize = 3 * 64;
        let comm: Comm = Arc::new(SingleRank::new("all"));
        let ((), recording) = record(ShapeSettings::default(), |device| {
            let x = Tensor::<2>::empty([64, HIDDEN], (device, DType::F32));
            let to = Tensor::<2, Int>::empty([64, 3], (device, DType::I32));
            let map = RowMap::new(to, 3, RowLayout::Rows(ROWS));
            let (scales, sizes) = (Fp8DispatchScales::F32, [&[ROWS][..], &[ROWS]]);
            drop(start_fp8_rows(x, scales, &map, sizes, &comm));
        })
        .unwrap();
        let mut kernels = vec![];
        for step in &recording.steps {
            match step {
                RecordedStep::Operation(OperationIr::Custom(kernel)) => kernels.push(kernel),
                RecordedStep::Operation(
                    OperationIr::BaseInt(BaseOperationIr::Cat(cat))
                    | OperationIr::BaseFloat(BaseOperationIr::Cat(cat)),
                ) => panic!("{cat:?}"),
                _ => {}
            }
        }
        let of_rows = |id: &str| -> Vec<usize> {
            let of_name = kernels.iter().filter(|kernel| kernel.id.contains(id));
            of_name.map(|kernel| kernel.outputs[0].shape[0]).collect()
        };
        assert_eq!(of_rows("quantize"), [64]);
        assert_eq!(of_rows("permute_words"), [ROWS]);
    }
}
