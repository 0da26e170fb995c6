//! The ranks that a token is sent to: each once, however many of its experts it has there.
//!
//! A token with choices `indices[t, j]` has `k` slots, and `k parts` where each expert is shared by `parts` ranks. The
//! first slot of a token with a destination has that destination, the others have -1. So a
//! [`RowMap`](super::permutation::RowMap) of the destinations has a row for each pair of a token and a destination,
//! and [`unpermute`](super::permutation::unpermute) adds them up.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Int, IntDType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::permutation::sort::{MAX_EXPERTS, check_experts};
use crate::KernelError;
use crate::error::accept;
use crate::launch::{DeviceOp, Spec, launch_one};

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
    if tokens * top_k * ranks.parts == 0 {
        let device = indices.device();
        return Tensor::empty([tokens, top_k * ranks.parts], (&device, DType::I32));
    }
    let op = DestinationsOp { ranks };
    Tensor::from_dispatch(launch_one(op, vec![indices.into_dispatch()]))
}

impl ExpertPlacement {
    fn check(&self) -> Result<(), KernelError> {
        check_experts(NAME, self.experts)?;
        if !(1..=MAX_EXPERTS).contains(&self.count) {
            let (name, fits) = ("destinations", "1 to 2048");
            return Err(KernelError::option(NAME, name, self.count, fits));
        }
        let even = self.experts_per_rank > 0 && self.experts.is_multiple_of(self.experts_per_rank);
        if even && self.size > 0 {
            return Ok(());
        }
        let message = format!(
            "{} experts, {} on a rank, and destinations of {} ranks: expected a divisor of the experts, and at least \
             1 rank",
            self.experts, self.experts_per_rank, self.size
        );
        Err(KernelError::shape(NAME, message))
    }
}

/// The input: the indices, of which there are some.
#[derive(Debug)]
struct DestinationsOp {
    ranks: ExpertPlacement,
}

impl DeviceOp for DestinationsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [tokens, top_k] = [inputs[0].shape[0], inputs[0].shape[1]];
        vec![Spec::new([tokens, top_k * self.ranks.parts], DType::I32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::destinations(&self.ranks, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::destinations(&self.ranks, inputs.remove(0))]
    }
}
