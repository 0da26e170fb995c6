//! Generation of inputs, and comparison of results.

use burn_megatron_kernels::philox::Stream;
use half::{bf16, f16};
use num_traits::{AsPrimitive, Bounded};

use burn_megatron_comm::{Buffer, DType, Element, ReduceOp, with_elements};

/// The type in which inputs are combined.
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

/// An element type with the operations that the suite needs.
pub(super) trait Number:
    Element + Bounded + AsPrimitive<Self::Sum> + AsPrimitive<f64>
{
    type Sum: Sum + AsPrimitive<Self>;
    /// The distance from 1 to the next greater number, or 0 for integers.
    const EPSILON: f64;

    /// Returns the number of this type that is nearest to `value`. Bytes wrap around.
    fn whole(value: i64) -> Self;

    /// Converts a floating-point number. Only for floating-point types.
    fn real(value: f64) -> Self;

    /// Returns whether two numbers are bit-identical. All NaNs count as equal.
    fn same(self, other: Self) -> bool;

    fn widen(self) -> Self::Sum {
        self.as_()
    }

    fn wide(self) -> f64 {
        self.as_()
    }
}

macro_rules! floats {
    ($($type:ty, $sum:ty, $epsilon:expr;)*) => {$(
        impl Number for $type {
            type Sum = $sum;
            const EPSILON: f64 = $epsilon;

            fn whole(value: i64) -> Self {
                Self::real(value as f64)
            }

            fn real(value: f64) -> Self {
                value.as_()
            }

            fn same(self, other: Self) -> bool {
                self.to_bits() == other.to_bits() || (self.is_nan() && other.is_nan())
            }
        }
    )*};
}

floats! {
    f64, f64, f64::EPSILON;
    f32, f32, f32::EPSILON as f64;
    bf16, f32, 1.0 / 128.0;
    f16, f32, 1.0 / 1024.0;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            type Sum = $type;
            const EPSILON: f64 = 0.0;

            fn whole(value: i64) -> Self {
                value as $type
            }

            fn real(_: f64) -> Self {
                unreachable!("the suite makes fractions of floats alone")
            }

            fn same(self, other: Self) -> bool {
                self == other
            }
        }
    )*};
}

integers!(i64, i32, u8);

/// Creates a buffer from a vector that `make` returns.
macro_rules! buffer_of {
    ($dtype:expr, $make:expr) => {{
        let mut buffer = Buffer::empty($dtype);
        with_elements!(&mut buffer, values => *values = $make);
        buffer
    }};
}

/// The generated inputs of one call. They are the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct TestData {
    pub seed: u64,
    /// The maximum absolute value of a generated whole number.
    pub most: i64,
}

impl TestData {
    /// Returns the input of the rank `rank`: whole numbers from `-most` to `most`, whose sums are exact in any order.
    /// Bytes wrap around.
    pub fn whole(self, dtype: DType, rank: usize, len: usize) -> Buffer {
        let count = 2 * self.most as u64 + 1;
        let number = |word: u32| ((u64::from(word) * count) >> 32) as i64 - self.most;
        buffer_of!(
            dtype,
            self.draw(rank, len, |word| Number::whole(number(word)))
        )
    }

    /// Returns the input of the rank `rank`: fractions of many magnitudes, whose sum depends on the order of the
    /// additions. Only for floating-point types.
    pub fn real(self, dtype: DType, rank: usize, len: usize) -> Buffer {
        let number = |word: u32| {
            let fraction = f64::from(word) / 2f64.powi(31) - 1.0;
            fraction * 2f64.powi((word % 12) as i32 - 4)
        };
        buffer_of!(
            dtype,
            self.draw(rank, len, |word| Number::real(number(word)))
        )
    }

    fn draw<T>(self, rank: usize, len: usize, number: impl Fn(u32) -> T) -> Vec<T> {
        let mut values = Vec::with_capacity(len);
        let stream = Stream::new(self.seed, rank as u64);
        stream.words(0, len, |_, word| values.push(number(word)));
        values
    }
}

/// Returns a buffer in which all `len` elements have the same value.
pub(super) fn repeated(dtype: DType, value: i64, len: usize) -> Buffer {
    buffer_of!(dtype, vec![Number::whole(value); len])
}

/// Returns a buffer in which all elements are the largest finite number of the type.
pub(super) fn largest(dtype: DType, len: usize) -> Buffer {
    buffer_of!(dtype, vec![Bounded::max_value(); len])
}

/// Returns a copy of a floating-point buffer with a NaN at index `at`.
pub(super) fn with_nan(buffer: Buffer, at: usize) -> Buffer {
    let mut buffer = buffer;
    assert!(buffer.set_nan(at), "{} has no NaN", buffer.dtype());
    buffer
}

/// The expected result of a call, with the maximum error of each element. If there are no maximum errors, the result
/// must be exact.
#[derive(Clone, Debug)]
pub(crate) struct Expected {
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

    /// Describes the first difference between the actual and the expected result. Returns `None` if there is no
    /// difference.
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
            // The types are equal, as checked above.
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
        // A NaN distance is not within any bound.
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
