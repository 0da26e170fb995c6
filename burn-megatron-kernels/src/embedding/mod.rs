//! The gradient of an embedding: each row of a gradient is added to the row that it was looked up from.
//!
//! Lookups are sorted by row on the host, so that one cube adds up those of a row in their order: the
//! sum has the same bits in every run, needs no atomics, and reads and writes only rows that were
//! looked up.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::KernelError;
use crate::error::accept;
use crate::flat::{self, Ranges};
use crate::gradient::{FlatGradients, check};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod sorted;
#[cfg(any(test, feature = "cubecl"))]
mod table;
#[cfg(test)]
mod tests;

pub use sorted::SortedLookups;

const NAME: &str = "accumulate_rows";

/// Adds `gradient` `[lookups, width]` to the rows `rows` of a table, whose gradient `[rows, width]` is at
/// the place of `target`; returns the flat buffer, written in place if it is uniquely owned.
///
/// Row `i` of the gradient goes to row `ids[i]` of the table, for the ids that `lookups` was made of;
/// ids outside of `rows` are left out, as other ranks have their rows. The rows of one id are added in
/// f32 (f64 for f64), in order: on the CPU one after the other, on CubeCL devices in parts of 128, which
/// are then added in order. The sum is added to the buffer, or written where the place does not add, and
/// rows without a lookup are 0 there.
///
/// On CubeCL devices the order is uploaded: 4 bytes for a lookup and up to 28 for an id.
///
/// # Panics
///
/// With a [`KernelError`] if the gradient has another number of rows than there are lookups, for a place
/// that exceeds the buffer, and for a type of the buffer that does not agree with that of the gradient.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::embedding::{SortedLookups, accumulate_rows};
/// use burn_megatron_kernels::gradient::{FlatGradients, Place};
///
/// let device = Device::flex();
/// let gradient = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], &device);
/// let lookups = SortedLookups::new(&[1, 0, 1]).into();
/// let target = FlatGradients {
///     flat: Tensor::ones([4], &device),
///     places: vec![Place { offset: 0, add: true }],
/// };
/// let flat = accumulate_rows(gradient, &lookups, 0..2, target);
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [4.0, 5.0, 7.0, 9.0]);
/// ```
pub fn accumulate_rows(
    gradient: Tensor<2>,
    lookups: &Arc<SortedLookups>,
    rows: Range<usize>,
    target: FlatGradients,
) -> Tensor<1> {
    let [count, width] = gradient.dims();
    accept(check_count(count, lookups));
    let elements = rows.len() * width;
    accept(check(NAME, &target, elements, gradient.dtype()));
    let FlatGradients { mut flat, places } = target;
    let place = places[0];
    if !place.add {
        let all = place.offset..place.offset + elements;
        flat = flat::clear(flat, &Ranges::new([all], &gradient.device()));
    }
    let found = lookups.within(&rows);
    if found.is_empty() || width == 0 {
        return flat;
    }
    let op = SimpleOp {
        name: NAME,
        parameters: AccumulateRowsOp {
            lookups: lookups.clone(),
            found,
            first_row: rows.start,
            offset: place.offset,
            width,
        },
        outputs: vec![Spec::of(&flat)],
        cpu: cpu::accumulate_rows,
        #[cfg(feature = "cubecl")]
        cube: kernel::accumulate_rows,
    };
    let inputs = vec![gradient.into_dispatch(), flat.into_dispatch()];
    Tensor::from_dispatch(launch_one(op, inputs))
}

fn check_count(count: usize, lookups: &SortedLookups) -> Result<(), KernelError> {
    if count == lookups.len() {
        return Ok(());
    }
    let message = format!(
        "a gradient of {count} rows for {} lookups: expected one row for each",
        lookups.len()
    );
    Err(KernelError::shape(NAME, message))
}

/// Inputs: the gradient and the flat buffer.
#[derive(Debug)]
struct AccumulateRowsOp {
    lookups: Arc<SortedLookups>,
    /// Indices of the ids whose rows are here.
    found: Range<usize>,
    /// The id of the first row that is here.
    first_row: usize,
    offset: usize,
    width: usize,
}
