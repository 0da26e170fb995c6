//! Expert capacity: selects the tokens that each expert keeps.
//!
//! A pair consists of a token and one of the experts that the router chose for the token. Pairs beyond the capacity of
//! their expert are dropped. Pairs are ranked by weight (largest first), then by token index. Without weights, they are
//! ranked by token index. No data is copied to the host.

use burn::tensor::{DType, Int, IntDType, Tensor};

use super::permutation::sort::check_experts;
use super::permutation::{RowLayout, RowMap};
use crate::cpu::wide;
use crate::error::{accept, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "keep_within_capacity";

/// Drops token-expert pairs, so that each expert keeps at most `capacity` pairs. Returns `indices` in I32, with dropped
/// pairs replaced by -1.
///
/// - `indices`: `[tokens, k]`, the experts that the router chose for each token.
/// - `weights`: `[tokens, k]`, the router weights. Each expert keeps the pairs with the largest weights. Without
///   weights, it keeps the pairs with the smallest token indices.
///
/// An index outside `0..experts` selects no expert and is returned unchanged. The function is not differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if there are no experts or more than 2048 experts, or if the
/// shapes of `weights` and `indices` differ.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_megatron_kernels::moe::capacity::keep_within_capacity;
///
/// let device = Device::flex();
/// let indices = Tensor::<2, Int>::from_ints([[0, 1], [0, 1]], &device);
/// let weights = Tensor::from_floats([[0.3, 0.7], [0.4, 0.6]], &device);
/// let kept = keep_within_capacity(indices, Some(weights), 2, 1);
/// assert_eq!(kept.into_data().iter::<i32>().collect::<Vec<_>>(), [-1, 1, 0, -1]);
/// ```
pub fn keep_within_capacity(
    indices: Tensor<2, Int>,
    weights: Option<Tensor<2>>,
    experts: usize,
    capacity: usize,
) -> Tensor<2, Int> {
    accept(check_experts(NAME, experts));
    let (sizes, given) = (indices.dims(), weights.as_ref().map(Tensor::dims));
    accept(check_shape(
        NAME,
        given.is_none_or(|given| given == sizes),
        || {
            let given = given.unwrap_or_default();
            format!("weights {given:?} for indices {sizes:?}: expected equal shapes")
        },
    ));
    let pairs = indices.dims().iter().product();
    let indices = indices.inner().cast(IntDType::I32);
    if pairs == 0 {
        return indices;
    }
    let shape = indices.shape();
    let map = RowMap::new(indices.clone(), experts, RowLayout::Rows(pairs));
    let mut inputs = vec![
        indices.into_dispatch(),
        map.slot_to_row.into_dispatch(),
        map.row_to_pair.into_dispatch(),
        map.offsets.into_dispatch(),
    ];
    inputs.extend(weights.map(|weights| {
        let dtype = wide(weights.dtype());
        weights.inner().cast(dtype).into_dispatch()
    }));
    let op = SimpleOp {
        name: NAME,
        parameters: (experts, capacity),
        outputs: vec![Spec::new(shape, DType::I32)],
        cpu: |&(experts, capacity), inputs| vec![cpu::keep(experts, capacity, &inputs)],
        #[cfg(feature = "cubecl")]
        cube: |(_, capacity), inputs| vec![kernel::keep(*capacity, inputs)],
    };
    Tensor::from_dispatch(launch_one(op, inputs))
}
