//! The reference implementation of [`accumulate`](super::accumulate), composed of Burn's own operations.

use burn::tensor::Tensor;

use crate::cpu::wide;

/// Computes [`accumulate`](super::accumulate) with Burn's operations.
///
/// # Panics
///
/// Panics with an error message of Burn if the range extends beyond the end of the buffer.
pub fn accumulate(flat: Tensor<1>, offset: usize, values: Tensor<1>, add: bool) -> Tensor<1> {
    let [count] = values.dims();
    // Burn does not slice an empty tensor.
    if count == 0 {
        return flat;
    }
    let (dtype, own) = (flat.dtype(), wide(flat.dtype()));
    let values = values.cast(own);
    let stretch = if add {
        flat.clone().narrow(0, offset, count).cast(own) + values
    } else {
        values
    };
    flat.slice_assign(offset..offset + count, stretch.cast(dtype))
}
