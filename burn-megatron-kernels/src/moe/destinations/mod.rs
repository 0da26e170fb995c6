//! Computes the destination ranks of each token. A rank occurs only once per token, even if it has several of the
//! token's experts.
//!
//! A token with `k` chosen experts has `k` slots, or `k * parts` slots if `parts` ranks share each expert. The first
//! slot of a destination holds the index of this destination. Later slots with the same destination hold -1. A
//! [`RowMap`](super::permutation::RowMap) that is created from the destinations therefore has one row for each pair of
//! a token and a destination. [`unpermute`](super::permutation::unpermute) adds the rows of each token.

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

/// The placement of experts on ranks, and the grouping of ranks into destinations.
///
/// A destination is a group of `size` consecutive ranks, such as a single rank or a node of a cluster. There are
/// `count` destinations. The first destination starts at rank `first`. Expert `e` is on the ranks
/// `(e / experts_per_rank) * stride + part * part_stride` for `part` in `0..parts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertPlacement {
    /// The total number of experts on all ranks.
    pub experts: usize,
    /// The number of experts per rank. It must be a divisor of `experts`.
    pub experts_per_rank: usize,
    /// The distance between the ranks of the experts `e` and `e + experts_per_rank`.
    pub stride: usize,
    /// The number of ranks that share an expert.
    pub parts: usize,
    /// The distance between two ranks that share an expert.
    pub part_stride: usize,
    /// The first rank of the first destination.
    pub first: usize,
    /// The number of ranks per destination.
    pub size: usize,
    /// The number of destinations.
    pub count: usize,
}

/// Returns the destinations of each token. `indices`, `[tokens, k]`, are the experts that the router chose for each
/// token. The result is `[tokens, k * parts]` in I32. It has one slot for each chosen expert and part.
///
/// A slot holds -1 if
/// - an earlier slot of the token has the same destination,
/// - the rank of the expert belongs to no destination,
/// - the index is outside `0..experts`.
///
/// The function is not differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - there are no experts or more than 2048 experts,
/// - there are no destinations or more than 2048 destinations, or a destination has no ranks,
/// - `experts_per_rank` is not a divisor of `experts`.
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
