//! The ranks that a token is sent to: each once, however many of its experts it has there.
//!
//! A token with choices `indices[t, j]` has `k` slots, and `k parts` where each expert is shared by `parts` ranks. The
//! first slot of a token with a destination has that destination, the others have -1. So a
//! [`RowMap`](super::permutation::RowMap) of the destinations has a row for each pair of a token and a destination,
//! and [`unpermute`](super::permutation::unpermute) adds them up.

use burn::tensor::{DType, Int, IntDType, Tensor};

use super::permutation::sort::{MAX_EXPERTS, check_experts};
use crate::KernelError;
use crate::error::{accept, check_option, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "destinations";

/// The ranks that have each expert, and their destinations: `count` runs of `size` ranks from `first` on, such as single
/// ranks or the nodes of a cluster.
///
/// Expert `e` is on the ranks `(e / experts_per_rank) stride + part part_stride`, for each `part` below `parts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertPlacement {
    /// The experts of all ranks.
    pub experts: usize,
    /// The experts of one rank, a divisor of all experts.
    pub experts_per_rank: usize,
    /// Between two ranks with consecutive experts.
    pub stride: usize,
    /// The ranks that share an expert.
    pub parts: usize,
    /// Between two of them.
    pub part_stride: usize,
    /// The first rank of the first destination.
    pub first: usize,
    /// The ranks of a destination.
    pub size: usize,
    /// The destinations.
    pub count: usize,
}

/// The destination of each slot of `indices` `[tokens, k]`: `[tokens, k parts]` in I32. -1 where an earlier slot of the
/// token has the same one, for ranks that are no destination, and for an index outside of the experts. Not differentiable.
///
/// # Panics
///
/// With a [`KernelError`]: no expert or more than 2048, no destination or more than 2048, an empty one, and experts
/// that are not split evenly.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_megatron_kernels::moe::destinations::{ExpertPlacement, destinations};
///
/// let device = Device::flex();
/// let ranks = ExpertPlacement {
///     experts: 4,
///     experts_per_rank: 2,
///     stride: 1,
///     parts: 1,
///     part_stride: 0,
///     first: 0,
///     size: 1,
///     count: 2,
/// };
/// // Experts 0 and 1 are on rank 0, experts 2 and 3 on rank 1.
/// let indices = Tensor::<2, Int>::from_ints([[0, 1], [3, 1], [-1, 2]], &device);
/// let found: Vec<i32> = destinations(indices, ranks).into_data().iter::<i32>().collect();
/// assert_eq!(found, [0, -1, 1, 0, -1, 1]);
/// ```
pub fn destinations(indices: Tensor<2, Int>, ranks: ExpertPlacement) -> Tensor<2, Int> {
    accept(ranks.check());
    let [tokens, top_k] = indices.dims();
    let indices = indices.inner().cast(IntDType::I32);
    let shape = [tokens, top_k * ranks.parts];
    if shape.contains(&0) {
        return Tensor::empty(shape, (&indices.device(), DType::I32));
    }
    let op = SimpleOp {
        name: NAME,
        parameters: ranks,
        outputs: vec![Spec::new(shape, DType::I32)],
        cpu: |ranks, inputs| vec![cpu::destinations(ranks, &inputs[0])],
        #[cfg(feature = "cubecl")]
        cube: |ranks, mut inputs| vec![kernel::destinations(ranks, inputs.remove(0))],
    };
    Tensor::from_dispatch(launch_one(op, vec![indices.into_dispatch()]))
}

impl ExpertPlacement {
    fn check(&self) -> Result<(), KernelError> {
        check_experts(NAME, self.experts)?;
        let fits = (1..=MAX_EXPERTS).contains(&self.count);
        check_option(NAME, fits, "destinations", self.count, "1 to 2048")?;
        let even = self.experts_per_rank > 0 && self.experts.is_multiple_of(self.experts_per_rank);
        check_shape(NAME, even && self.size > 0, || {
            format!(
                "{} experts, {} on a rank, and destinations of {} ranks: expected a divisor of the experts, and at \
                 least 1 rank",
                self.experts, self.experts_per_rank, self.size
            )
        })
    }
}
