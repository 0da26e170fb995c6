//! The reduction tree of a chunk, and the types of its elements and accumulators.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::buffer::Element;
use crate::call::ReduceOp;

/// The inputs of the other ranks to the reduction of a chunk.
pub(super) struct OtherInputs<'a, T> {
    /// The complete inputs, in group order.
    pub parts: &'a [&'a [T]],
    /// The index of the first element of the chunk in each input.
    pub start: usize,
}

impl<T> OtherInputs<'_, T> {
    fn ranks(&self) -> usize {
        self.parts.len() + 1
    }
}

pub(super) fn chunk_at<T>(whole: &[T], start: usize, len: usize) -> &[T] {
    &whole[start..start + len]
}

/// Combines the inputs in `rest` into `sums`. `sums` contains the subtree of the `width` inputs before `rest`.
fn reduce_tree<T: ReduceElement>(
    sums: &mut [T::Sum],
    mut width: usize,
    mut rest: OtherInputs<'_, T>,
    scratch: &mut [T::Sum],
    combine: &impl Fn(T::Sum, T::Sum) -> T::Sum,
) {
    let (start, len) = (rest.start, sums.len());
    let at = |part| chunk_at(part, start, len);
    while !rest.parts.is_empty() {
        // The neighbor is the subtree of the next `width` contributions, or of all remaining contributions.
        let (neighbour, after) = rest.parts.split_at(width.min(rest.parts.len()));
        match neighbour {
            [first, second, parts @ ..] => {
                let (own, deeper) = scratch.split_at_mut(len);
                T::pair(at(first), at(second), own, deeper, combine);
                reduce_tree(own, 2, OtherInputs { parts, start }, deeper, combine);
                merge(sums, own, combine);
            }
            _ => merge(sums, T::widen(at(neighbour[0]), scratch), combine),
        }
        rest.parts = after;
        width *= 2;
    }
}

fn merge<S: Copy>(sums: &mut [S], values: &[S], combine: &impl Fn(S, S) -> S) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum = combine(*sum, *value);
    }
}

/// An element type that can be reduced.
pub(super) trait ReduceElement: Element {
    /// The type in which values are accumulated.
    type Sum: Accumulator;
    /// The number of additional scratch chunks that `reduce_chunk` and `widen` require.
    const SCRATCH_CHUNKS: usize;

    /// Copies an input into the accumulators.
    fn load(values: &[Self], sums: &mut [Self::Sum]);

    /// Converts an input to the type in which values are accumulated. Returns the input itself, or a widened copy at
    /// the beginning of `spare`.
    fn widen<'a>(values: &'a [Self], spare: &'a mut [Self::Sum]) -> &'a [Self::Sum];

    /// Combines two inputs into `sums`, whose previous contents are ignored.
    fn pair(
        first: &[Self],
        second: &[Self],
        sums: &mut [Self::Sum],
        spare: &mut [Self::Sum],
        combine: &impl Fn(Self::Sum, Self::Sum) -> Self::Sum,
    );

    /// Reduces the inputs in `rest` into a chunk.
    fn reduce_chunk(
        chunk: &mut [Self],
        rest: OtherInputs<'_, Self>,
        op: ReduceOp,
        scratch: &mut [Self::Sum],
    );
}

/// A type in which values are accumulated.
pub(super) trait Accumulator: Copy + Default {
    /// Reduces the inputs in `rest` into `sums`, which contains the input before `rest`.
    fn reduce<T: ReduceElement<Sum = Self>>(
        sums: &mut [Self],
        rest: OtherInputs<'_, T>,
        op: ReduceOp,
        scratch: &mut [Self],
    );
}

macro_rules! accumulate_floats {
    ($($type:ty),*) => {$(
        impl Accumulator for $type {
            fn reduce<T: ReduceElement<Sum = Self>>(
                sums: &mut [Self],
                rest: OtherInputs<'_, T>,
                op: ReduceOp,
                scratch: &mut [Self],
            ) {
                let ranks = rest.ranks() as $type;
                // If a value is NaN, the result is NaN: a NaN must not disappear in a maximum.
                let max = |a: $type, b: $type| if a.is_nan() || a > b { a } else { b };
                let min = |a: $type, b: $type| if a.is_nan() || a < b { a } else { b };
                match op {
                    ReduceOp::Sum | ReduceOp::Average => reduce_tree(sums, 1, rest, scratch, &|a, b| a + b),
                    ReduceOp::Max => reduce_tree(sums, 1, rest, scratch, &max),
                    ReduceOp::Min => reduce_tree(sums, 1, rest, scratch, &min),
                }
                if op == ReduceOp::Average {
                    sums.iter_mut().for_each(|sum| *sum /= ranks);
                }
            }
        }
    )*};
}
accumulate_floats!(f64, f32);

macro_rules! accumulate_integers {
    ($($type:ty),*) => {$(
        impl Accumulator for $type {
            fn reduce<T: ReduceElement<Sum = Self>>(
                sums: &mut [Self],
                rest: OtherInputs<'_, T>,
                op: ReduceOp,
                scratch: &mut [Self],
            ) {
                match op {
                    ReduceOp::Sum => reduce_tree(sums, 1, rest, scratch, &<$type>::wrapping_add),
                    ReduceOp::Max => reduce_tree(sums, 1, rest, scratch, &Ord::max),
                    ReduceOp::Min => reduce_tree(sums, 1, rest, scratch, &Ord::min),
                    ReduceOp::Average => unreachable!("refused before the call was started"),
                }
            }
        }
    )*};
}
accumulate_integers!(i64, i32, u8);

macro_rules! reduce_as_they_are {
    ($($type:ty),*) => {$(
        impl ReduceElement for $type {
            type Sum = Self;
            const SCRATCH_CHUNKS: usize = 0;

            fn load(values: &[Self], sums: &mut [Self]) {
                sums.copy_from_slice(values);
            }

            fn widen<'a>(values: &'a [Self], _spare: &'a mut [Self]) -> &'a [Self] {
                values
            }

            fn pair(
                first: &[Self],
                second: &[Self],
                sums: &mut [Self],
                _spare: &mut [Self],
                combine: &impl Fn(Self, Self) -> Self,
            ) {
                for ((sum, a), b) in sums.iter_mut().zip(first).zip(second) {
                    *sum = combine(*a, *b);
                }
            }

            fn reduce_chunk(
                chunk: &mut [Self],
                rest: OtherInputs<'_, Self>,
                op: ReduceOp,
                scratch: &mut [Self],
            ) {
                Self::reduce(chunk, rest, op, scratch);
            }
        }
    )*};
}
reduce_as_they_are!(f64, f32, i64, i32, u8);

macro_rules! reduce_in_f32 {
    ($($type:ty),*) => {$(
        impl ReduceElement for $type {
            type Sum = f32;
            const SCRATCH_CHUNKS: usize = 2;

            fn load(values: &[Self], sums: &mut [f32]) {
                values.convert_to_f32_slice(sums);
            }

            fn widen<'a>(values: &'a [Self], spare: &'a mut [f32]) -> &'a [f32] {
                let wide = &mut spare[..values.len()];
                values.convert_to_f32_slice(wide);
                wide
            }

            fn pair(
                first: &[Self],
                second: &[Self],
                sums: &mut [f32],
                spare: &mut [f32],
                combine: &impl Fn(f32, f32) -> f32,
            ) {
                Self::load(first, sums);
                merge(sums, Self::widen(second, spare), combine);
            }

            fn reduce_chunk(
                chunk: &mut [Self],
                rest: OtherInputs<'_, Self>,
                op: ReduceOp,
                scratch: &mut [f32],
            ) {
                let (sums, scratch) = scratch.split_at_mut(chunk.len());
                Self::load(chunk, sums);
                f32::reduce(sums, rest, op, scratch);
                chunk.convert_from_f32_slice(sums);
            }
        }
    )*};
}
reduce_in_f32!(bf16, f16);
