use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};

use super::*;
use crate::fp8::matrix::{mx_words, words};
use crate::fp8::{BLOCK, Format, MX_BLOCK, Scales, e8m0};
use crate::testing::devices;

mod asked;
mod flat;
mod numbers;
mod order;
mod refused;

/// The kind of scales of a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ScalesKind {
    Tensor,
    Rows,
    Squares,
    Mx,
}

impl ScalesKind {
    const ALL: [Self; 4] = [Self::Tensor, Self::Rows, Self::Squares, Self::Mx];
}

/// A matrix on a device, and its values.
struct Case {
    matrix: Fp8Matrix,
    values: Vec<f64>,
}

/// The distribution of the codes and scales of test values.
#[derive(Clone, Copy, Debug)]
struct TestValues {
    format: Format,
    kind: ScalesKind,
    /// Whether values are small integers times powers of two, so that sums are exact in f32.
    exact: bool,
    seed: u32,
}

/// Returns a generator of pseudorandom numbers.
fn noise(seed: u32) -> impl FnMut() -> u32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    }
}

impl TestValues {
    fn code(&self, random: u32) -> u8 {
        if self.exact {
            return self.format.encode((random % 9) as f32 - 4.0);
        }
        let code = random as u8;
        if self.format.decode(code).is_finite() {
            code
        } else {
            0
        }
    }

    fn scale(&self, random: u32) -> f32 {
        if self.exact {
            [0.5, 1.0, 2.0][random as usize % 3]
        } else {
            0.01 + random as f32 / u32::MAX as f32
        }
    }

    fn matrix(&self, rows: usize, depth: usize, device: &Device) -> Case {
        let mut next = noise(self.seed);
        let codes: Vec<u8> = (0..rows * depth).map(|_| self.code(next())).collect();
        let (height, width) = match self.kind {
            ScalesKind::Tensor => (rows.max(1), depth.max(1)),
            ScalesKind::Rows => (1, BLOCK),
            ScalesKind::Squares => (BLOCK, BLOCK),
            ScalesKind::Mx => (1, MX_BLOCK),
        };
        let sizes = match self.kind {
            ScalesKind::Tensor => [1, 1],
            _ => [rows.div_ceil(height), depth.div_ceil(width)],
        };
        let scales: Vec<f32> = (0..sizes[0] * sizes[1])
            .map(|_| match self.kind {
                ScalesKind::Mx => e8m0::decode(126 + (next() % 3) as u8),
                _ => self.scale(next()),
            })
            .collect();
        let values = (0..rows * depth).map(|at| {
            let (row, column) = (at / depth, at % depth);
            let scale = scales[row / height * sizes[1] + column / width];
            f64::from(self.format.decode(codes[at])) * f64::from(scale)
        });
        let scales_of = |scales: Vec<f32>| match self.kind {
            ScalesKind::Tensor => {
                Scales::Tensor(Tensor::from_data(TensorData::new(scales, [1]), device))
            }
            ScalesKind::Rows | ScalesKind::Squares => Scales::Blocks {
                scales: Tensor::from_data(TensorData::new(scales, sizes), device),
                height,
            },
            ScalesKind::Mx => {
                let bytes: Vec<u8> = scales.iter().map(|s| (s.to_bits() >> 23) as u8).collect();
                Scales::Mx(packed(&bytes, sizes, mx_words(depth), device))
            }
        };
        let values: Vec<f64> = values.collect();
        let matrix = Fp8Matrix {
            codes: packed(&codes, [rows, depth], words(depth), device),
            scales: scales_of(scales),
            format: self.format,
            depth,
        };
        Case { matrix, values }
    }
}

/// Packs bytes `[rows, columns]` into rows of `words` words.
fn packed(
    bytes: &[u8],
    [rows, columns]: [usize; 2],
    words: usize,
    device: &Device,
) -> Tensor<2, Int> {
    let mut all = vec![0u32; rows * words];
    for (at, byte) in bytes.iter().enumerate() {
        let (row, column) = (at / columns, at % columns);
        all[row * words + column / 4] |= u32::from(*byte) << (8 * (column % 4));
    }
    let data = TensorData::new(all, [rows, words]);
    Tensor::from_data(data, (device, DType::U32))
}

/// Returns `a b^T` of the values, and `|a| |b|^T`, which bounds the errors.
fn product(a: &Case, b: &Case) -> (Vec<f64>, Vec<f64>) {
    let depth = a.matrix.depth;
    let row = |case: &Case, row: usize| case.values[row * depth..(row + 1) * depth].to_vec();
    let rows: Vec<_> = (0..b.matrix.rows()).map(|at| row(b, at)).collect();
    let mut both = (vec![], vec![]);
    for x in (0..a.matrix.rows()).map(|at| row(a, at)) {
        for y in &rows {
            let (mut sum, mut bound) = (0.0, 0.0);
            for (x, y) in x.iter().zip(y) {
                sum += x * y;
                bound += (x * y).abs();
            }
            both.0.push(sum);
            both.1.push(bound);
        }
    }
    both
}

fn doubles<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    let data = tensor.into_data().convert_dtype(DType::F64);
    data.try_into_vec().expect("converted to f64")
}

/// The number of rows of both operands, and the depth. cuBLASLt supports the last three sizes.
const SIZES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [3, 5, 7],
    [33, 17, 130],
    [130, 129, 33],
    [16, 32, 48],
    [128, 16, 256],
    [48, 80, 272],
];
