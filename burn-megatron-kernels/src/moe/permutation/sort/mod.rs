//! The stable counting sort: pairs are counted by expert, chunk by chunk, then each is placed behind
//! those before it.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::layout::LayoutSizes;
use super::{NAME, RowLayout};
use crate::KernelError;
use crate::launch::{DeviceOp, Spec, exactly, launch};

mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;

/// The most experts: a cube keeps a number for each in shared memory.
pub const MAX_EXPERTS: usize = 2048;

/// Pairs that are counted together.
const CHUNK: usize = 512;

/// Refuses no expert and too many.
pub(in crate::moe) fn check_experts(
    operation: &'static str,
    experts: usize,
) -> Result<(), KernelError> {
    if (1..=MAX_EXPERTS).contains(&experts) {
        return Ok(());
    }
    Err(KernelError::option(
        operation,
        "experts",
        experts,
        "1 to 2048",
    ))
}

/// The expert of an index, if there is one.
pub(in crate::moe) fn expert(index: i32, experts: usize) -> Option<usize> {
    usize::try_from(index)
        .ok()
        .filter(|expert| *expert < experts)
}

/// The pairs of each expert, and where its rows begin.
pub(super) struct Counted {
    /// `[chunks, experts]`: the pairs of the expert in earlier chunks.
    before: DispatchTensor,
    /// `[experts]`
    pub counts: Tensor<1, Int>,
    /// `[experts + 1]`
    pub offsets: Tensor<1, Int>,
}

/// Counts `indices` `[tokens, k]` in I32, of which there are some.
pub(super) fn count(indices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> Counted {
    let op = CountOp {
        experts,
        sizes: layout.sizes(),
    };
    let [before, counts, offsets] = exactly(launch(op, vec![indices.into_dispatch()]));
    Counted {
        before,
        counts: Tensor::from_dispatch(counts),
        offsets: Tensor::from_dispatch(offsets),
    }
}

/// The pair of each row, and the row of each pair.
pub(super) fn place(
    indices: Tensor<2, Int>,
    counted: &Counted,
    rows: usize,
    layout: RowLayout,
) -> (Tensor<1, Int>, Tensor<2, Int>) {
    let inputs = vec![
        indices.into_dispatch(),
        counted.before.clone(),
        counted.offsets.clone().into_dispatch(),
    ];
    let op = PlaceOp {
        rows,
        fills: layout == RowLayout::Kept,
    };
    let [pairs, rows] = exactly(launch(op, inputs));
    (Tensor::from_dispatch(pairs), Tensor::from_dispatch(rows))
}

/// Indices to [`Counted`].
#[derive(Debug)]
struct CountOp {
    experts: usize,
    sizes: LayoutSizes,
}

impl DeviceOp for CountOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let chunks = inputs[0].shape.num_elements().div_ceil(CHUNK);
        let ints = |shape: &[usize]| Spec::new(shape.to_vec(), DType::I32);
        vec![
            ints(&[chunks, self.experts]),
            ints(&[self.experts]),
            ints(&[self.experts + 1]),
        ]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::count(self, &inputs[0])
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::count(self, inputs)
    }
}

/// Indices, `before` and the offsets to the pair of each row and the row of each pair.
#[derive(Debug)]
struct PlaceOp {
    rows: usize,
    /// Whether each row has a pair.
    #[cfg_attr(
        not(feature = "cubecl"),
        expect(dead_code, reason = "on the CPU all rows are empty at first")
    )]
    fills: bool,
}

impl DeviceOp for PlaceOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![
            Spec::new([self.rows], DType::I32),
            Spec::new(inputs[0].shape.clone(), DType::I32),
        ]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        cpu::place(self, &inputs)
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        kernel::place(self, inputs)
    }
}
