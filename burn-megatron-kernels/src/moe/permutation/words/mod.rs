//! Rows of words that two tensors have parts of, written once in the order of a map.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::{RowMap, check_rows};
use crate::error::{U32, accept, check_type};
use crate::launch::{DeviceOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "permute_words";

/// `left` `[tokens, a]` and `right` `[tokens, b]` of U32, such as codes and their scales, to `[rows, a + b]`: the words of
/// the token of each row, and zeros in empty rows. Not differentiable.
///
/// # Panics
///
/// With a [`KernelError`](crate::KernelError) for another number of tokens than the map's, or another type.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Int, IntDType, Tensor};
/// use burn_megatron_kernels::moe::permutation::{RowLayout, RowMap, permute_words};
///
/// let device = Device::flex();
/// // The second token has rows of both experts.
/// let map = RowMap::new(Tensor::from_ints([[0, -1], [0, 1]], &device), 2, RowLayout::Rows(3));
/// let words = |values| Tensor::<2, Int>::from_ints(values, &device).cast(IntDType::U32);
/// let rows = permute_words(words([[1], [2]]), words([[10], [20]]), &map);
/// let found: Vec<u32> = rows.into_data().try_into_vec().unwrap();
/// assert_eq!(found, [1, 10, 2, 20, 2, 20]);
/// ```
pub fn permute_words(left: Tensor<2, Int>, right: Tensor<2, Int>, map: &RowMap) -> Tensor<2, Int> {
    for part in [&left, &right] {
        accept(check_rows(NAME, part.dims()[0], map.tokens));
        accept(check_type(NAME, "type of the words", part.dtype(), U32));
    }
    let op = PermuteWordsOp {
        rows: map.rows,
        top_k: map.top_k,
        widths: [left.dims()[1], right.dims()[1]],
    };
    if op.rows * op.width() * map.tokens == 0 {
        return Tensor::zeros([op.rows, op.width()], (&left.device(), DType::U32));
    }
    let index = map.row_to_pair.clone().into_dispatch();
    let inputs = vec![left.into_dispatch(), right.into_dispatch(), index];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// The inputs: both parts, and the pair of each row. There are some words.
#[derive(Debug)]
struct PermuteWordsOp {
    rows: usize,
    top_k: usize,
    /// The widths of the parts.
    widths: [usize; 2],
}

impl PermuteWordsOp {
    fn width(&self) -> usize {
        self.widths.iter().sum()
    }
}

impl DeviceOp for PermuteWordsOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([self.rows, self.width()], DType::U32)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::permute_words(self, &inputs)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        vec![kernel::permute_words(self, inputs)]
    }
}
