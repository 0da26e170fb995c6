//! Reductions in a fixed order: a binary tree over adjacent inputs, in group order.
//!
//! The tree first combines the inputs of ranks 0 and 1, ranks 2 and 3, and so on. Then it combines pairs of results,
//! and so on. An input without a partner moves up one level unchanged.
//!
//! A reduction can first run over inner groups of 2^k adjacent ranks and then over the results of these groups. It
//! performs the same additions as a single reduction over all ranks, so both results are bit-identical.

use std::ops::Range;

use crate::buffer::{Buffer, Element};
use crate::call::ReduceOp;
use crate::with_elements;
use tree::{Accumulator, OtherInputs, ReduceElement, chunk_at};

#[cfg(test)]
mod tests;
mod tree;

/// The number of elements that are reduced at a time. With this number, the partial results of a chunk, one per level
/// of the tree, stay in the L1 cache.
const CHUNK: usize = 512;

/// Reduces the buffers in `rest` into `first`, in order. `first` is the first input. All buffers have the same type and
/// length.
pub(crate) fn reduce_into(first: &mut Buffer, rest: &[&Buffer], op: ReduceOp) {
    with_elements!(first, values => {
        let rest: Vec<&[_]> = rest.iter().map(|buffer| typed(buffer)).collect();
        reduce_chunks(values, None, &rest, op);
    });
}

/// Reduces the elements in `range` of several buffers into `result`. The buffers have the same type and length.
/// `result` has the type of the buffers and the length of the range.
pub(crate) fn reduce_range(
    inputs: &[&Buffer],
    range: Range<usize>,
    op: ReduceOp,
    result: &mut Buffer,
) {
    with_elements!(result, values => {
        let parts: Vec<&[_]> = inputs.iter().map(|b| &typed(b)[range.clone()]).collect();
        reduce_chunks(values, Some(parts[0]), &parts[1..], op);
    });
}

/// Splits a 16-bit buffer into `parts` parts of equal length and sums the parts element by element into `sums`. The
/// length of `sums` is the length of one part. The order of the additions is the order of a reduction over `parts`
/// ranks. The sums are not rounded to 16 bits.
///
/// # Panics
/// If the element type is not a 16-bit float, or if the lengths do not match.
pub fn sum_parts_in_f32(whole: &Buffer, parts: usize, sums: &mut [f32]) {
    assert_eq!(whole.len(), parts * sums.len(), "the parts fit the sums");
    match whole {
        Buffer::BF16(values) => sum_in_f32(values, parts, sums),
        Buffer::F16(values) => sum_in_f32(values, parts, sums),
        other => unreachable!("{} is not a 16-bit float", other.dtype()),
    }
}

fn sum_in_f32<T: ReduceElement<Sum = f32>>(whole: &[T], parts: usize, sums: &mut [f32]) {
    let len = sums.len();
    let parts: Vec<&[T]> = (0..parts).map(|i| &whole[i * len..(i + 1) * len]).collect();
    let mut scratch = scratch::<T>(parts.len(), len);
    for (start, sums) in chunks(sums) {
        T::load(chunk_at(parts[0], start, sums.len()), sums);
        let rest = OtherInputs::<T> {
            parts: &parts[1..],
            start,
        };
        f32::reduce(sums, rest, ReduceOp::Sum, &mut scratch);
    }
}

/// Reduces `rest` into `values`. The first input is `first`, or the contents of `values` if `first` is `None`.
fn reduce_chunks<T: ReduceElement>(
    values: &mut [T],
    first: Option<&[T]>,
    rest: &[&[T]],
    op: ReduceOp,
) {
    let mut scratch = scratch::<T>(rest.len() + 1, values.len());
    for (start, chunk) in chunks(values) {
        if let Some(first) = first {
            chunk.copy_from_slice(chunk_at(first, start, chunk.len()));
        }
        let rest = OtherInputs { parts: rest, start };
        T::reduce_chunk(chunk, rest, op, &mut scratch);
    }
}

fn typed<T: Element>(buffer: &Buffer) -> &[T] {
    T::view(buffer).expect("the types were compared when the contributions arrived")
}

/// Splits `values` into chunks. Returns each chunk with the index of its first element.
fn chunks<T>(values: &mut [T]) -> impl Iterator<Item = (usize, &mut [T])> {
    let numbered = values.chunks_mut(CHUNK).enumerate();
    numbered.map(|(number, chunk)| (number * CHUNK, chunk))
}

/// Allocates scratch memory for one chunk on each level of the tree except the lowest level, plus the scratch chunks
/// that the element type needs.
fn scratch<T: ReduceElement>(ranks: usize, len: usize) -> Vec<T::Sum> {
    let levels = (ranks.ilog2() as usize).saturating_sub(1);
    vec![T::Sum::default(); (levels + T::SCRATCH_CHUNKS) * len.min(CHUNK)]
}
