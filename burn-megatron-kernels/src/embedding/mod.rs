//! The gradient of an embedding. Each row of the output gradient is added to the gradient of the table row that was
//! looked up.
//!
//! The host sorts the lookups by table row, so that one cube (thread block) adds the gradients of all lookups of a
//! table row in a fixed order. The sum is bitwise identical in every run and needs no atomic additions. Only table rows
//! with lookups are read and written.

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

/// Adds the gradients of embedding lookups, `[lookups, width]`, to the gradient of the embedding table. `rows` is the
/// range of the table rows on this rank.
///
/// The gradient of the table rows, `[rows, width]`, is stored at the place of `target` in a flat buffer. The function
/// returns the flat buffer, which is updated in place if no other tensor shares its memory.
///
/// Row `i` of `gradient` is added to row `ids[i]` of the table, where `ids` are the ids of `lookups`. Ids outside
/// `rows` are skipped, because their table rows are on other ranks.
///
/// The gradient rows of one id are added in order in f32 (f64 for f64). The CPU adds the rows one after the other.
/// CubeCL devices first add blocks of up to 128 rows, and then add the sums of the blocks in order. The total is added
/// to the buffer. If the place has `add: false`, the total overwrites the buffer, and table rows without a lookup
/// become 0.
///
/// On CubeCL devices the sorted lookups are copied to the device: 4 bytes per lookup and up to 28 bytes per distinct
/// id.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - the number of gradient rows differs from the number of lookups,
/// - the place extends beyond the end of the buffer,
/// - the type of the buffer does not match the type of the gradient.
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

/// The addition as a device operation. Its inputs are the gradient and the flat buffer.
#[derive(Debug)]
struct AccumulateRowsOp {
    lookups: Arc<SortedLookups>,
    /// The index range of the ids whose rows are on this rank.
    found: Range<usize>,
    /// The id of the first table row on this rank.
    first_row: usize,
    offset: usize,
    width: usize,
}
