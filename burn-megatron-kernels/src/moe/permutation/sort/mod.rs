//! A stable counting sort of pairs by expert. First the pairs of each expert are counted, chunk by chunk. Then each
//! pair is placed after the earlier pairs of its expert.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, Tensor};

use super::{NAME, RowLayout};
use crate::KernelError;
use crate::error::check_option;
use crate::launch::{SimpleOp, Spec, exactly, launch};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

/// The maximum number of experts. A kernel keeps one number per expert in shared memory.
pub const MAX_EXPERTS: usize = 2048;

/// The number of pairs per chunk. The pairs of a chunk are counted together.
const CHUNK: usize = 512;

/// Checks that there is at least one expert, and at most [`MAX_EXPERTS`].
pub(in crate::moe) fn check_experts(
    operation: &'static str,
    experts: usize,
) -> Result<(), KernelError> {
    let fits = (1..=MAX_EXPERTS).contains(&experts);
    check_option(operation, fits, "experts", experts, "1 to 2048")
}

/// Returns the expert with an index, or `None` if the index is outside `0..experts`.
pub(in crate::moe) fn expert(index: i32, experts: usize) -> Option<usize> {
    usize::try_from(index)
        .ok()
        .filter(|expert| *expert < experts)
}

/// The number of pairs of each expert, and the start of the expert's rows.
pub(super) struct Counted {
    /// The number of pairs of each expert in earlier chunks, `[chunks, experts]`.
    before: DispatchTensor,
    /// The number of pairs of each expert, `[experts]`.
    pub counts: Tensor<1, Int>,
    /// The index of the first row of each expert, followed by the end of the last rows, `[experts + 1]`.
    pub offsets: Tensor<1, Int>,
}

/// Counts the pairs of each expert. `indices` is `[tokens, k]` in I32 and must not be empty.
pub(super) fn count(indices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> Counted {
    let chunks = indices.shape().num_elements().div_ceil(CHUNK);
    let ints = |shape: &[usize]| Spec::new(shape.to_vec(), DType::I32);
    let op = SimpleOp {
        name: NAME,
        parameters: (experts, layout.sizes()),
        outputs: vec![
            ints(&[chunks, experts]),
            ints(&[experts]),
            ints(&[experts + 1]),
        ],
        cpu: |(experts, sizes), inputs| cpu::count(*experts, sizes, &inputs[0]),
        #[cfg(feature = "cubecl")]
        cube: |(experts, sizes), mut inputs| kernel::count(*experts, sizes, inputs.remove(0)),
    };
    let [before, counts, offsets] = exactly(launch(op, vec![indices.into_dispatch()]));
    Counted {
        before,
        counts: Tensor::from_dispatch(counts),
        offsets: Tensor::from_dispatch(offsets),
    }
}

/// Returns the pair of each row, and the row of each pair.
pub(super) fn place(
    indices: Tensor<2, Int>,
    counted: &Counted,
    rows: usize,
    layout: RowLayout,
) -> (Tensor<1, Int>, Tensor<2, Int>) {
    let op = SimpleOp {
        name: NAME,
        parameters: (rows, layout == RowLayout::Kept),
        outputs: vec![
            Spec::new([rows], DType::I32),
            Spec::new(indices.shape(), DType::I32),
        ],
        cpu: |(rows, _), inputs| cpu::place(*rows, &inputs),
        #[cfg(feature = "cubecl")]
        cube: |&(rows, fills), inputs| kernel::place(rows, fills, inputs),
    };
    let inputs = vec![
        indices.into_dispatch(),
        counted.before.clone(),
        counted.offsets.clone().into_dispatch(),
    ];
    let [pairs, rows] = exactly(launch(op, inputs));
    (Tensor::from_dispatch(pairs), Tensor::from_dispatch(rows))
}
