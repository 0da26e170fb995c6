//! Sums of squares of many segments of a buffer in one pass, with one result per segment.

use std::ops::Range;
use std::sync::OnceLock;

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::squares::squares;
use crate::KernelError;
use crate::cpu::{for_float, map_tasks, own, slice, slice_mut, wide};
use crate::error::{accept, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

const NAME: &str = "largest_sums_of_squares";

/// The alignment of segments: each segment must start at a multiple of this number. Parameters in a bucket have the
/// same alignment.
pub const SEGMENT_ALIGNMENT: usize = super::DECAY_BLOCK;

/// The number of elements per chunk. A cube sums one chunk.
pub(super) const CHUNK: usize = 8192;

/// Disjoint ranges (segments) of a buffer. A sum of squares is computed for each segment.
#[derive(Clone, Debug)]
pub struct Segments {
    ranges: Vec<Range<usize>>,
    /// Created at first use, because planning a model creates segments but no buffers.
    table: OnceLock<Tensor<1, Int>>,
}

impl Segments {
    /// Creates segments from ranges. The ranges must start at multiples of [`SEGMENT_ALIGNMENT`].
    ///
    /// The elements between the end of a segment and the next multiple of [`SEGMENT_ALIGNMENT`] must be 0.
    ///
    /// # Panics
    ///
    /// Panics with a [`KernelError`] if a range does not start at a multiple of [`SEGMENT_ALIGNMENT`].
    pub fn new(ranges: Vec<Range<usize>>) -> Self {
        let off = ranges
            .iter()
            .find(|range| !range.start.is_multiple_of(SEGMENT_ALIGNMENT));
        accept(off.map_or(Ok(()), |range| {
            let (name, fits) = ("start of a segment", "a multiple of 64");
            Err(KernelError::option(NAME, name, range.start, fits))
        }));
        Self {
            ranges,
            table: OnceLock::new(),
        }
    }

    /// Returns the start and the end of each chunk, then the number of chunks before each segment,
    /// then the total number of chunks.
    fn table(&self, device: &Device) -> Tensor<1, Int> {
        let upload = || {
            let (mut bounds, mut before) = (vec![], vec![]);
            for range in &self.ranges {
                before.push((bounds.len() / 2) as u32);
                for start in range.clone().step_by(CHUNK) {
                    bounds.extend([start, range.end.min(start + CHUNK)].map(|at| at as u32));
                }
            }
            let chunks = bounds.len() / 2;
            bounds.extend(before);
            bounds.push(chunks as u32);
            let length = bounds.len();
            let table = TensorData::new(bounds, [length]);
            Tensor::from_data(table, (device, DType::U32))
        };
        self.table.get_or_init(upload).clone()
    }

    /// Returns the number of segments.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Returns whether there are no segments.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }
}

/// Updates `largest[first + i]` to the maximum of its current value and the sum of squares of segment `i` of `x`.
/// Updates `largest[0]` in the same way with the sum over all segments.
///
/// NaN counts as larger than any number, so an element of `largest` that is NaN stays NaN.
///
/// `largest` is `[length]` with non-negative elements, in f64 on the CPU and in f32 on other devices. It is updated in
/// place if no other tensor shares its memory. Sums of f32 and 16-bit types are rounded to f32. The order of summation
/// within a segment does not depend on the other segments.
///
/// # Panics
///
/// Panics with a [`KernelError`] if a segment ends after the end of `x`, if `largest` is too short for the results, or
/// if `first` is 0.
pub fn largest_sums_of_squares(
    x: Tensor<1>,
    segments: &Segments,
    largest: Tensor<1>,
    first: usize,
) -> Tensor<1> {
    accept(check(&x, segments, &largest, first));
    if segments.ranges.iter().all(Range::is_empty) {
        return largest;
    }
    let op = SimpleOp {
        name: NAME,
        parameters: (segments.ranges.clone(), first),
        outputs: vec![Spec::of(&largest)],
        cpu: |(ranges, first), mut inputs| {
            let largest = inputs.remove(0);
            vec![largest_on_cpu(largest, *first, &inputs[0], ranges)]
        },
        #[cfg(feature = "cubecl")]
        cube: |(ranges, first), inputs| {
            let chunks = ranges.iter().map(|range| range.len().div_ceil(CHUNK));
            let (chunks, segments) = (chunks.sum(), ranges.len());
            vec![super::kernel::largest_sums(
                inputs, chunks, segments, *first,
            )]
        },
    };
    let table = segments.table(&x.device()).into_dispatch();
    let inputs = vec![largest.into_dispatch(), x.into_dispatch(), table];
    Tensor::from_dispatch(launch_one(op, inputs))
}

fn check(
    x: &Tensor<1>,
    segments: &Segments,
    largest: &Tensor<1>,
    first: usize,
) -> Result<(), KernelError> {
    let ([length], [results]) = (x.dims(), largest.dims());
    let ends = segments.ranges.iter().map(|range| range.end);
    let (end, sums) = (ends.max().unwrap_or(0), segments.len());
    check_shape(NAME, end <= length, || {
        format!("a buffer of {length} elements has a segment up to {end}")
    })?;
    let needed = first + sums;
    check_shape(NAME, first > 0 && results >= needed, || {
        format!(
            "{sums} sums from element {first} on of {results} results: expected 1 or more, and {needed} results"
        )
    })
}

fn largest_on_cpu(
    largest: FlexTensor,
    first: usize,
    x: &FlexTensor,
    ranges: &[Range<usize>],
) -> FlexTensor {
    let rounded = |sum: f64| match wide(x.dtype()) {
        DType::F64 => sum,
        _ => f64::from(sum as f32),
    };
    let sums: Vec<f64> = for_float!(x.dtype(), E => {
        let x = slice::<E>(x);
        map_tasks(ranges, |range| squares(&x[range.clone()]))
    });
    let total = rounded(sums.iter().sum());
    let mut largest = own::<f64>(largest);
    let results = slice_mut::<f64>(&mut largest);
    raise(&mut results[0], total);
    for (result, sum) in results[first..].iter_mut().zip(sums) {
        raise(result, rounded(sum));
    }
    largest
}

/// Updates `largest` to the larger of `largest` and `sum`. Both are non-negative, and NaN is larger than any number.
fn raise(largest: &mut f64, sum: f64) {
    if sum.to_bits() > largest.to_bits() {
        *largest = sum;
    }
}
