//! The generated inputs, and the comparison of results.

use burn_megatron_kernels::philox::Stream;
use half::{bf16, f16};

use crate::buffer::{Buffer, DType, Element, with_elements};
use crate::call::ReduceOp;

/// What contributions are combined in.
pub(super) trait Sum: Copy {
    fn combine(self, other: Self, op: ReduceOp) -> Self;
    fn divided_by(self, ranks: usize) -> Self;
}

macro_rules! sum_floats {
    ($($type:ty),*) => {$(
        impl Sum for $type {
            fn combine(self, other: Self, op: ReduceOp) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => self + other,
                    ReduceOp::Max if self.is_nan() || self > other => self,
                    ReduceOp::Min if self.is_nan() || self < other => self,
                    ReduceOp::Max | ReduceOp::Min => other,
                }
            }

            fn divided_by(self, ranks: usize) -> Self {
                self / ranks as $type
            }
        }
    )*};
}
sum_floats!(f64, f32);

macro_rules! sum_integers {
    ($($type:ty),*) => {$(
        impl Sum for $type {
            fn combine(self, other: Self, op: ReduceOp) -> Self {
                match op {
                    ReduceOp::Sum | ReduceOp::Average => self.wrapping_add(other),
                    ReduceOp::Max => self.max(other),
                    ReduceOp::Min => self.min(other),
                }
            }

            fn divided_by(self, _ranks: usize) -> Self {
                unreachable!("the suite asks for averages of floats alone")
            }
        }
    )*};
}
sum_integers!(i64, i32, u8);

/// A type of elements, with all that the suite needs of it.
pub(super) trait Number: Element {
    type Sum: Sum;
    /// The distance from 1 to the next number; 0 for integers.
    const EPSILON: f64;
    fn whole(value: i64) -> Self;
    /// For floats alone.
    fn real(value: f64) -> Self;
    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn wide(self) -> f64;
    /// Bit for bit, but for the bits of a NaN.
    fn same(self, other: Self) -> bool;
}

macro_rules! number {
    ($type:ty, $sum:ty, $epsilon:expr, $whole:expr, $real:expr, $widen:expr, $narrow:expr, $wide:expr, $same:expr) => {
        impl Number for $type {
            type Sum = $sum;
            const EPSILON: f64 = $epsilon;

            fn whole(value: i64) -> Self {
                $whole(value)
            }

            fn real(value: f64) -> Self {
                $real(value)
            }

            fn widen(self) -> $sum {
                $widen(self)
            }

            fn narrow(sum: $sum) -> Self {
                $narrow(sum)
            }

            fn wide(self) -> f64 {
                $wide(self)
            }

            fn same(self, other: Self) -> bool {
                $same(self, other)
            }
        }
    };
}

macro_rules! float {
    ($type:ty, $sum:ty, $epsilon:expr, $from_f64:expr, $widen:expr, $narrow:expr, $wide:expr) => {
        number!(
            $type,
            $sum,
            $epsilon,
            |value: i64| $from_f64(value as f64),
            $from_f64,
            $widen,
            $narrow,
            $wide,
            |a: $type, b: $type| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
        );
    };
}
float!(f64, f64, f64::EPSILON, |x| x, |x| x, |x| x, |x| x);
float!(
    f32,
    f32,
    f32::EPSILON as f64,
    |x| x as f32,
    |x| x,
    |x| x,
    f64::from
);
float!(
    bf16,
    f32,
    1.0 / 128.0,
    bf16::from_f64,
    bf16::to_f32,
    bf16::from_f32,
    bf16::to_f64
);
float!(
    f16,
    f32,
    1.0 / 1024.0,
    f16::from_f64,
    f16::to_f32,
    f16::from_f32,
    f16::to_f64
);

macro_rules! integer {
    ($($type:ty),*) => {$(
        number!(
            $type,
            $type,
            0.0,
            |value| value as $type,
            |_| unreachable!("the suite makes fractions of floats alone"),
            |x| x,
            |x| x,
            |x| x as f64,
            |a, b| a == b
        );
    )*};
}
integer!(i64, i32, u8);

/// Runs `$body` with `$type` bound to the Rust type of a `DType`.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $type = f64;
                $body
            }
            DType::F32 => {
                type $type = f32;
                $body
            }
            DType::BF16 => {
                type $type = bf16;
                $body
            }
            DType::F16 => {
                type $type = f16;
                $body
            }
            DType::I64 => {
                type $type = i64;
                $body
            }
            DType::I32 => {
                type $type = i32;
                $body
            }
            DType::U8 => {
                type $type = u8;
                $body
            }
        }
    };
}

/// The numbers of one call, made alike on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct TestData {
    pub seed: u64,
    /// The largest whole number.
    pub most: i64,
}

impl TestData {
    /// What `rank` gives: whole numbers from `-most` to `most`, whose sums are exact in any order; as
    /// bytes they wrap around.
    pub fn whole(self, dtype: DType, rank: usize, len: usize) -> Buffer {
        let count = 2 * self.most as u64 + 1;
        let number = |word: u32| ((u64::from(word) * count) >> 32) as i64 - self.most;
        with_type!(dtype, T => Buffer::from(self.draw(rank, len, |word| T::whole(number(word)))))
    }

    /// What `rank` gives: fractions of many magnitudes, whose sum shows its order. For float types.
    pub fn real(self, dtype: DType, rank: usize, len: usize) -> Buffer {
        let number = |word: u32| {
            let fraction = f64::from(word) / 2f64.powi(31) - 1.0;
            fraction * 2f64.powi((word % 12) as i32 - 4)
        };
        with_type!(dtype, T => Buffer::from(self.draw(rank, len, |word| T::real(number(word)))))
    }

    fn draw<T>(self, rank: usize, len: usize, number: impl Fn(u32) -> T) -> Vec<T> {
        let mut values = Vec::with_capacity(len);
        let stream = Stream::new(self.seed, rank as u64);
        stream.words(0, len, |_, word| values.push(number(word)));
        values
    }
}

/// The same number `len` times.
pub(super) fn repeated(dtype: DType, value: i64, len: usize) -> Buffer {
    with_type!(dtype, T => Buffer::from(vec![T::whole(value); len]))
}

/// The largest number of an integer type, and the largest finite one of a float.
pub(super) fn largest(dtype: DType, len: usize) -> Buffer {
    with_type!(dtype, T => Buffer::from(vec![T::MAX; len]))
}

/// A copy of a float buffer with a NaN at `at`.
pub(super) fn with_nan(buffer: Buffer, at: usize) -> Buffer {
    let mut buffer = buffer;
    match &mut buffer {
        Buffer::F64(values) => values[at] = f64::NAN,
        Buffer::F32(values) => values[at] = f32::NAN,
        Buffer::BF16(values) => values[at] = bf16::NAN,
        Buffer::F16(values) => values[at] = f16::NAN,
        other => unreachable!("{} has no NaN", other.dtype()),
    }
    buffer
}

/// What a call must give, and how far each element may be from it; exactly where there are no bounds.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    pub buffer: Buffer,
    pub bounds: Option<Vec<f64>>,
}

impl Expected {
    pub fn exactly(buffer: Buffer) -> Self {
        Self {
            buffer,
            bounds: None,
        }
    }

    /// The first difference in words.
    pub fn difference(&self, found: &Buffer) -> Option<String> {
        let wanted = &self.buffer;
        let (found_as, wanted_as) = ((found.len(), found.dtype()), (wanted.len(), wanted.dtype()));
        if found_as != wanted_as {
            return Some(format!(
                "the result is {} {}, expected {} {}",
                found_as.0, found_as.1, wanted_as.0, wanted_as.1
            ));
        }
        with_elements!(wanted, wanted => {
            // The types were compared above.
            let found = found.as_slice().ok()?;
            first_difference(found, wanted, self.bounds.as_deref())
        })
    }
}

fn first_difference<T: Number>(
    found: &[T],
    wanted: &[T],
    bounds: Option<&[f64]>,
) -> Option<String> {
    let differs = |at: &usize| {
        let (found, wanted) = (found[*at], wanted[*at]);
        let distance = (found.wide() - wanted.wide()).abs();
        // A distance that is NaN is within no bound.
        let is_close = bounds.is_some_and(|bounds| distance <= bounds[*at]);
        !found.same(wanted) && !is_close
    };
    let at = (0..wanted.len()).find(differs)?;
    let within = match bounds.map(|bounds| bounds[at]) {
        None | Some(0.0) => String::new(),
        Some(bound) => format!(" within {bound:e}"),
    };
    let (found, wanted, len) = (found[at], wanted[at], wanted.len());
    Some(format!(
        "element {at} of {len} is {found:?}, expected {wanted:?}{within}"
    ))
}
