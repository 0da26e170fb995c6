//! Permutation of the rows of two integer tensors, which are joined in the result.

use burn::tensor::{DType, Int, Tensor};

use super::{RowMap, check_rows};
use crate::error::{U32, accept, check_type};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "permute_words";

/// Copies the rows of two integer tensors, such as FP8 codes and their scales, into the row order of `map`. The result
/// is `[rows, a + b]`. Each row holds the integers of its token from `left`, followed by the integers from `right`.
/// Empty rows are zero.
///
/// - `left`: `[tokens, a]` in U32.
/// - `right`: `[tokens, b]` in U32.
///
/// The function is not differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the number of tokens differs from the number of tokens in
/// `map`, or if a tensor is not U32.
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
    let sizes = WordSizes {
        rows: map.rows,
        top_k: map.top_k,
        widths: [left.dims()[1], right.dims()[1]],
    };
    let shape = [sizes.rows, sizes.width()];
    if shape.iter().product::<usize>() * map.tokens == 0 {
        return Tensor::zeros(shape, (&left.device(), DType::U32));
    }
    let op = SimpleOp {
        name: NAME,
        parameters: sizes,
        outputs: vec![Spec::new(shape, DType::U32)],
        cpu: |sizes, inputs| vec![cpu::permute_words(sizes, &inputs)],
        #[cfg(feature = "cubecl")]
        cube: |sizes, inputs| vec![kernel::permute_words(sizes, inputs)],
    };
    let index = map.row_to_pair.clone().into_dispatch();
    let inputs = vec![left.into_dispatch(), right.into_dispatch(), index];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// The permutation as a device operation. Its inputs are both parts, and the pair of each row. There is at least one
/// integer.
#[derive(Debug)]
struct WordSizes {
    rows: usize,
    top_k: usize,
    /// The widths of the left and the right part.
    widths: [usize; 2],
}

impl WordSizes {
    fn width(&self) -> usize {
        self.widths.iter().sum()
    }
}
