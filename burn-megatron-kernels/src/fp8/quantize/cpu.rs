//! On Burn's CPU backend.

use burn::backend::flex::FlexTensor;
use burn::tensor::TensorData;

use super::super::matrix::{mx_words, words};
use super::super::{BLOCK, Format, MX_BLOCK, e8m0};
use super::{CurrentScale, Dequantize, Kind, Quantize, ScaleOf};
use crate::cpu::{Element, for_float, slice, tensor};

/// See [`Quantize`].
pub(super) fn quantize(kernel: &Quantize, inputs: &[FlexTensor]) -> Vec<FlexTensor> {
    let x = &inputs[0];
    let [rows, columns] = [x.layout().shape()[0], x.layout().shape()[1]];
    let given = inputs.get(1).map(|scale| slice::<f32>(scale)[0]);
    let values: Vec<f32> =
        for_float!(x.dtype(), E => slice::<E>(x).iter().map(|v| v.wide() as f32).collect());
    let mut beyond = 0u32;
    let mut all = vec![];
    let mut copy =
        |rows: usize, depth: usize, at: &dyn Fn(usize, usize) -> f32, beyond: &mut u32| {
            let copy = Copy {
                kernel,
                rows,
                depth,
                given,
            };
            all.extend(copy.make(at, beyond));
        };
    if kernel.ways.rowwise {
        copy(
            rows,
            columns,
            &|row, at| values[row * columns + at],
            &mut beyond,
        );
    }
    if kernel.ways.columnwise {
        let count = &mut 0;
        let count = if kernel.ways.rowwise {
            count
        } else {
            &mut beyond
        };
        copy(columns, rows, &|row, at| values[at * columns + row], count);
    }
    let amax = largest(values.iter().copied());
    all.push(tensor(vec![amax, beyond as f32], [2]));
    all
}

struct Copy<'a> {
    kernel: &'a Quantize,
    rows: usize,
    depth: usize,
    given: Option<f32>,
}

impl Copy<'_> {
    fn make(&self, at: &dyn Fn(usize, usize) -> f32, beyond: &mut u32) -> [FlexTensor; 2] {
        let (rows, depth, format) = (self.rows, self.depth, self.kernel.format);
        let mut codes = vec![0u32; rows * words(depth)];
        let mut put = |row: usize, column: usize, value: f32| {
            *beyond += u32::from(value.abs() > format.max());
            let code = u32::from(format.encode(value));
            codes[row * words(depth) + column / 4] |= code << (8 * (column % 4));
        };
        let scales = match self.kernel.kind {
            Kind::Tensor => {
                let scale = self.given.unwrap_or(1.0);
                for row in 0..rows {
                    (0..depth).for_each(|column| put(row, column, at(row, column) * scale));
                }
                tensor(vec![1.0 / scale], [1])
            }
            Kind::Blocks {
                square,
                power_of_two,
            } => {
                let height = if square { BLOCK } else { 1 };
                let shape = [rows.div_ceil(height), depth.div_ceil(BLOCK)];
                let mut scales = vec![];
                for top in (0..rows).step_by(height) {
                    for left in (0..depth).step_by(BLOCK) {
                        let block = || {
                            (top..rows.min(top + height)).flat_map(|row| {
                                (left..depth.min(left + BLOCK)).map(move |column| (row, column))
                            })
                        };
                        let amax = largest(block().map(|(row, column)| at(row, column)));
                        let options = CurrentScale {
                            epsilon: 0.0,
                            power_of_two,
                        };
                        let scale = current(amax, format, options);
                        block().for_each(|(row, column)| put(row, column, at(row, column) * scale));
                        scales.push(1.0 / scale);
                    }
                }
                tensor(scales, shape)
            }
            Kind::Mx => {
                let mut scales = vec![0u32; rows * mx_words(depth)];
                for row in 0..rows {
                    for (block, left) in (0..depth).step_by(MX_BLOCK).enumerate() {
                        let block_of = left..depth.min(left + MX_BLOCK);
                        let amax = largest(block_of.clone().map(|column| at(row, column)));
                        let code = e8m0::of_amax(amax);
                        scales[row * mx_words(depth) + block / 4] |=
                            u32::from(code) << (8 * (block % 4));
                        let [half, rest] = halves(code);
                        block_of.for_each(|column| put(row, column, at(row, column) * half * rest));
                    }
                }
                integers(scales, [rows, mx_words(depth)])
            }
        };
        [integers(codes, [rows, words(depth)]), scales]
    }
}

/// Two factors of `2^(127 - code)`, neither of them subnormal; NaN for NaN.
fn halves(code: u8) -> [f32; 2] {
    if code == e8m0::NAN {
        return [f32::NAN; 2];
    }
    let exponent = 127 - i32::from(code);
    let half = exponent / 2;
    [half, exponent - half].map(|e| f32::from_bits(((e + 127) as u32) << 23))
}

/// See [`Dequantize`].
pub(super) fn dequantize(kernel: &Dequantize, inputs: &[FlexTensor]) -> FlexTensor {
    let (codes, scales) = (&inputs[0], &inputs[1]);
    let (rows, depth) = (codes.layout().shape()[0], kernel.depth);
    let codes = words_of(codes);
    let mut values = vec![0f32; rows * depth];
    for row in 0..rows {
        for column in 0..depth {
            let word = codes[row * words(depth) + column / 4];
            let scale = match kernel.kind {
                Kind::Tensor => slice::<f32>(scales)[0],
                Kind::Blocks { square, .. } => {
                    let height = if square { BLOCK } else { 1 };
                    slice::<f32>(scales)[row / height * depth.div_ceil(BLOCK) + column / BLOCK]
                }
                Kind::Mx => {
                    let block = column / MX_BLOCK;
                    let word = words_of(scales)[row * mx_words(depth) + block / 4];
                    e8m0::decode((word >> (8 * (block % 4))) as u8)
                }
            };
            let code = (word >> (8 * (column % 4))) as u8;
            values[row * depth + column] = kernel.format.decode(code) * scale;
        }
    }
    tensor(values, [rows, depth])
}

pub(super) fn amax(x: &FlexTensor) -> FlexTensor {
    let values: Vec<f32> =
        for_float!(x.dtype(), E => slice::<E>(x).iter().map(|v| v.wide() as f32).collect());
    tensor(vec![largest(values.into_iter())], [1])
}

pub(super) fn scale_of(kernel: &ScaleOf, amax: &FlexTensor) -> FlexTensor {
    tensor(
        vec![current(
            slice::<f32>(amax)[0],
            kernel.format,
            kernel.options,
        )],
        [1],
    )
}

/// The largest magnitude: NaN if there is one, as its bits are above all others.
fn largest(values: impl Iterator<Item = f32>) -> f32 {
    f32::from_bits(
        values
            .map(|value| value.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0),
    )
}

fn current(amax: f32, format: Format, options: CurrentScale) -> f32 {
    let amax = if amax < options.epsilon {
        options.epsilon
    } else {
        amax
    };
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    let scale = (format.max() / amax).min(f32::MAX);
    match options.power_of_two {
        true => f32::from_bits(scale.to_bits() & 0x7f80_0000),
        false => scale,
    }
}

fn integers(values: Vec<u32>, shape: [usize; 2]) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

fn words_of(tensor: &FlexTensor) -> &[u32] {
    match tensor.as_slice() {
        Some(words) => words,
        None => unreachable!("codes are u32 side by side"),
    }
}
