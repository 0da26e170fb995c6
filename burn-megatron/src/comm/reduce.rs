//! Reductions in a fixed order: the contributions are folded from left to right, in group order.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::buffer::{Buffer, Element, with_elements};
use super::call::ReduceOp;

/// Elements folded at a time: the accumulator stays in the first-level cache while every rank's
/// contribution passes by.
const CHUNK: usize = 2048;

/// Reduces whole buffers of one type and length into the first of them.
pub(super) fn reduce_all(mut inputs: Vec<Buffer>, op: ReduceOp) -> Buffer {
    let rest = inputs.split_off(1);
    let mut first = inputs.remove(0);
    with_elements!(&mut first, values => {
        let rest: Vec<&[_]> = rest.iter().map(typed).collect();
        Reduce::fold(values, &rest, op);
    });
    first
}

/// Reduces the elements `range` of buffers of one type and length.
pub(super) fn reduce_range(inputs: &[&Buffer], range: Range<usize>, op: ReduceOp) -> Buffer {
    let mut first = inputs[0].slice(range.clone());
    with_elements!(&mut first, values => {
        let rest: Vec<&[_]> = inputs[1..].iter().map(|b| &typed(b)[range.clone()]).collect();
        Reduce::fold(values, &rest, op);
    });
    first
}

fn typed<T: Element>(buffer: &Buffer) -> &[T] {
    T::view(buffer).expect("the types were compared when the contributions arrived")
}

/// Folds `rest`, in order, into the accumulator, which starts as the first rank's contribution.
trait Reduce: Element {
    fn fold(accumulator: &mut [Self], rest: &[&[Self]], op: ReduceOp);
}

fn fold_with<T: Element>(
    accumulator: &mut [T],
    rest: &[&[T]],
    combine: impl Fn(T, T) -> T,
    finish: impl Fn(T) -> T,
) {
    for (number, chunk) in accumulator.chunks_mut(CHUNK).enumerate() {
        let (start, end) = (number * CHUNK, number * CHUNK + chunk.len());
        for other in rest {
            for (sum, value) in chunk.iter_mut().zip(&other[start..end]) {
                *sum = combine(*sum, *value);
            }
        }
        chunk.iter_mut().for_each(|value| *value = finish(*value));
    }
}

macro_rules! reduce_floats {
    ($($type:ty),*) => {$(
        impl Reduce for $type {
            fn fold(accumulator: &mut [Self], rest: &[&[Self]], op: ReduceOp) {
                let ranks = (rest.len() + 1) as $type;
                // A NaN wins against every number: it must not vanish in a maximum.
                let max = |a: $type, b: $type| if a.is_nan() || a > b { a } else { b };
                let min = |a: $type, b: $type| if a.is_nan() || a < b { a } else { b };
                match op {
                    ReduceOp::Sum => fold_with(accumulator, rest, |a, b| a + b, |a| a),
                    ReduceOp::Average => fold_with(accumulator, rest, |a, b| a + b, |a| a / ranks),
                    ReduceOp::Max => fold_with(accumulator, rest, max, |a| a),
                    ReduceOp::Min => fold_with(accumulator, rest, min, |a| a),
                }
            }
        }
    )*};
}
reduce_floats!(f64, f32);

macro_rules! reduce_halves {
    ($($type:ty),*) => {$(
        impl Reduce for $type {
            fn fold(accumulator: &mut [Self], rest: &[&[Self]], op: ReduceOp) {
                let (mut sums, mut wide) = ([0f32; CHUNK], [0f32; CHUNK]);
                let ranks = (rest.len() + 1) as f32;
                let combine = if op == ReduceOp::Average { ReduceOp::Sum } else { op };
                for (number, chunk) in accumulator.chunks_mut(CHUNK).enumerate() {
                    let (start, len) = (number * CHUNK, chunk.len());
                    let (sums, wide) = (&mut sums[..len], &mut wide[..len]);
                    chunk.convert_to_f32_slice(sums);
                    for other in rest {
                        other[start..start + len].convert_to_f32_slice(wide);
                        f32::fold(sums, &[wide], combine);
                    }
                    if op == ReduceOp::Average {
                        sums.iter_mut().for_each(|sum| *sum /= ranks);
                    }
                    chunk.convert_from_f32_slice(sums);
                }
            }
        }
    )*};
}
reduce_halves!(bf16, f16);

macro_rules! reduce_integers {
    ($($type:ty),*) => {$(
        impl Reduce for $type {
            fn fold(accumulator: &mut [Self], rest: &[&[Self]], op: ReduceOp) {
                match op {
                    ReduceOp::Sum => fold_with(accumulator, rest, <$type>::wrapping_add, |a| a),
                    ReduceOp::Max => fold_with(accumulator, rest, Ord::max, |a| a),
                    ReduceOp::Min => fold_with(accumulator, rest, Ord::min, |a| a),
                    ReduceOp::Average => unreachable!("refused before the call was started"),
                }
            }
        }
    )*};
}
reduce_integers!(i64, i32, u8);
