//! The formulas, implemented with loops and without the kernels.

use std::cmp::Ordering;
use std::sync::OnceLock;

use burn::tensor::{Device, Tensor, TensorData};

use crate::nn::fp8::*;

/// A format, described by its fields.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    mantissa: u32,
    bias: i32,
    /// The code of the largest value.
    last: u32,
}

pub const E4M3: Codes = Codes {
    mantissa: 3,
    bias: 7,
    last: 0x7e,
};

pub const E5M2: Codes = Codes {
    mantissa: 2,
    bias: 15,
    last: 0x7b,
};

impl Codes {
    /// Returns the formats of values and of gradients.
    pub fn of(recipe: Fp8Recipe, format: Fp8Format) -> [Self; 2] {
        match (recipe, format) {
            (Fp8Recipe::Delayed(_) | Fp8Recipe::Current(_), Fp8Format::Hybrid) => [E4M3, E5M2],
            _ => [E4M3, E4M3],
        }
    }

    fn value(self, code: u32) -> f64 {
        let (exponent, fraction) = (code >> self.mantissa, code & ((1 << self.mantissa) - 1));
        let steps = f64::from(1 << self.mantissa);
        match exponent {
            0 => f64::from(fraction) / steps * 2f64.powi(1 - self.bias),
            _ => (1.0 + f64::from(fraction) / steps) * 2f64.powi(exponent as i32 - self.bias),
        }
    }

    pub fn max(self) -> f32 {
        self.value(self.last) as f32
    }

    /// Returns the values of the codes, in ascending order.
    fn values(self) -> &'static [f64] {
        static VALUES: [OnceLock<Vec<f64>>; 2] = [OnceLock::new(), OnceLock::new()];
        let values = || (0..=self.last).map(|code| self.value(code)).collect();
        VALUES[usize::from(self.mantissa == 2)].get_or_init(values)
    }

    /// Returns the nearest value. Ties are rounded to the even code.
    pub fn round(self, x: f32) -> f32 {
        if x.is_nan() {
            return x;
        }
        let (magnitude, values) = (f64::from(x).abs(), self.values());
        let above = values.partition_point(|value| *value < magnitude);
        let rounded = match (above.checked_sub(1), values.get(above)) {
            (_, None) => f64::from(self.max()),
            (None, Some(zero)) => *zero,
            (Some(below), Some(high)) => {
                let low = values[below];
                match (magnitude - low).total_cmp(&(high - magnitude)) {
                    Ordering::Less => low,
                    Ordering::Greater => *high,
                    Ordering::Equal if below % 2 == 0 => low,
                    Ordering::Equal => *high,
                }
            }
        };
        (rounded as f32).copysign(x)
    }
}

/// A matrix, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub values: Vec<f32>,
}

impl Matrix {
    pub fn of<const D: usize>(x: &Tensor<D>) -> Self {
        let columns = x.dims()[D - 1];
        let values = super::floats(x.clone());
        Self {
            rows: values.len() / columns,
            columns,
            values,
        }
    }

    pub fn at(&self, row: usize, column: usize) -> f32 {
        self.values[row * self.columns + column]
    }

    pub fn transposed(&self) -> Self {
        let (rows, columns) = (self.columns, self.rows);
        let values = (0..rows).flat_map(|row| (0..columns).map(move |column| self.at(column, row)));
        Self {
            rows,
            columns,
            values: values.collect(),
        }
    }

    fn map_blocks(&self, [height, width]: [usize; 2], f: impl Fn(&[f32]) -> Vec<f32>) -> Self {
        let mut values = vec![0.0; self.values.len()];
        for top in (0..self.rows).step_by(height) {
            for left in (0..self.columns).step_by(width) {
                let rows = top..self.rows.min(top + height);
                let columns = left..self.columns.min(left + width);
                let places: Vec<_> = rows
                    .flat_map(|row| {
                        columns
                            .clone()
                            .map(move |column| row * self.columns + column)
                    })
                    .collect();
                let block: Vec<_> = places.iter().map(|place| self.values[*place]).collect();
                for (place, value) in places.into_iter().zip(f(&block)) {
                    values[place] = value;
                }
            }
        }
        Self {
            values,
            ..self.clone()
        }
    }

    /// Returns the quantized values of an operand of a matmul that sums over the columns of this matrix. `scale` is
    /// used with delayed scaling.
    pub fn quantised(&self, recipe: Fp8Recipe, operand: Operand, codes: Codes, scale: f32) -> Self {
        let whole = [self.rows, self.columns];
        let scaled = |values: &[f32], scale: f32| -> Vec<f32> {
            let back = 1.0 / scale;
            values
                .iter()
                .map(|x| codes.round(x * scale) * back)
                .collect()
        };
        let of_amax = |values: &[f32], power_of_two: bool| {
            let amax = values.iter().fold(0f32, |amax, x| amax.max(x.abs()));
            match (amax == 0.0, power_of_two) {
                (true, _) => 1.0,
                (_, false) => codes.max() / amax,
                (_, true) => 2f32.powi((f64::from(codes.max() / amax)).log2().floor() as i32),
            }
        };
        match recipe {
            Fp8Recipe::Delayed(_) => self.map_blocks(whole, |x| scaled(x, scale)),
            Fp8Recipe::Current(of) => {
                self.map_blocks(whole, |x| scaled(x, of_amax(x, of.power_of_two)))
            }
            Fp8Recipe::Blockwise(of) => {
                let height = if operand == Operand::Weight { 128 } else { 1 };
                self.map_blocks([height, 128], |x| scaled(x, of_amax(x, of.power_of_two)))
            }
            Fp8Recipe::MxFp8 => self.map_blocks([1, 32], |x| {
                let amax = x.iter().fold(0f32, |amax, x| amax.max(x.abs()));
                let mut exponent = -127;
                while f64::from(amax) > 448.0 * 2f64.powi(exponent) {
                    exponent += 1;
                }
                let (up, back) = (2f64.powi(-exponent), 2f64.powi(exponent));
                let value = |x: &f32| {
                    let code = codes.round((f64::from(*x) * up) as f32);
                    (f64::from(code) * back) as f32
                };
                x.iter().map(value).collect()
            }),
        }
    }

    pub fn tensor(&self) -> Tensor<2> {
        let data = TensorData::new(self.values.clone(), [self.rows, self.columns]);
        Tensor::from_data(data, &Device::flex())
    }

    /// Returns `self other^T`, with sequential sums.
    pub fn times(&self, other: &Self) -> Self {
        let at = |row: usize, column: usize| -> f32 {
            let products = (0..self.columns).map(|k| self.at(row, k) * other.at(column, k));
            products.sum()
        };
        let values = (0..self.rows).flat_map(|row| (0..other.rows).map(move |c| (row, c)));
        Self {
            rows: self.rows,
            columns: other.rows,
            values: values.map(|(row, column)| at(row, column)).collect(),
        }
    }
}

/// The tensors of a layer.
pub struct Layer {
    /// The input: `[tokens, in]`.
    pub x: Matrix,
    /// The weight: `[in, out]`.
    pub weight: Matrix,
    /// The gradient of the output: `[tokens, out]`.
    pub dy: Matrix,
    pub recipe: Fp8Recipe,
    pub format: Fp8Format,
    /// The scales of delayed scaling.
    pub scales: [f32; 3],
}

impl Layer {
    /// Returns the left and right operands of the matmuls for `y`, `dx` and `dw`. Each matmul sums over the columns of
    /// both operands.
    pub fn factors(&self) -> [[Matrix; 2]; 3] {
        let [values, gradients] = Codes::of(self.recipe, self.format);
        let of = |matrix: &Matrix, operand: Operand, codes| {
            matrix.quantised(self.recipe, operand, codes, self.scales[operand as usize])
        };
        let (x, weight, dy) = (&self.x, &self.weight, &self.dy);
        [
            [
                of(x, Operand::Input, values),
                of(&weight.transposed(), Operand::Weight, values),
            ],
            [
                of(dy, Operand::Gradient, gradients),
                of(weight, Operand::Weight, values),
            ],
            [
                of(&x.transposed(), Operand::Input, values),
                of(&dy.transposed(), Operand::Gradient, gradients),
            ],
        ]
    }
}

/// Tests all values of codes, and the midpoints between neighbours.
#[test]
fn this_rounding_is_that_of_the_formats() {
    for (codes, kernel) in [
        (E4M3, burn_megatron_kernels::fp8::Format::E4M3),
        (E5M2, burn_megatron_kernels::fp8::Format::E5M2),
    ] {
        for code in 0..codes.last {
            let (low, high) = (codes.value(code), codes.value(code + 1));
            let middle = ((low + high) / 2.0) as f32;
            assert_eq!(f64::from(codes.round(low as f32)), low);
            let even = if code % 2 == 0 { low } else { high };
            assert_eq!(f64::from(codes.round(middle)), even);
            let around = [middle, middle.next_down(), middle.next_up()];
            for x in around.into_iter().flat_map(|x| [x, -x]) {
                let kernel = kernel.decode(kernel.encode(x));
                assert_eq!(codes.round(x).to_bits(), kernel.to_bits(), "{x}");
            }
        }
        assert_eq!(codes.max(), kernel.max());
        assert_eq!(codes.round(1e9), codes.max());
        assert_eq!(codes.round(f32::NEG_INFINITY), -codes.max());
    }
}
