//! The CubeCL kernels of the masked softmax. One cube processes one row.
//!
//! A row that fits in the registers of a cube is read once. A longer row is read twice: one pass computes a running
//! maximum and sum, and a second pass computes the result. Vectors of masked keys are not read, and zeros are written
//! for them.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

use super::{KeyRange, SinkKind, SoftmaxProblem};
use crate::cube::RowPlan;
use crate::cube::instance::{AotList, default_fields};

mod backward;
mod forward;

pub(super) use backward::backward;
pub(super) use forward::forward;

/// The lowest finite value. A score that is not above it counts as masked.
const LOWEST: f32 = f32::MIN;

/// The range of visible keys `low..high`, and the range of vectors `first..last` that contain these keys.
#[derive(CubeType)]
struct VisibleVectors {
    low: usize,
    high: usize,
    first: usize,
    last: usize,
}

/// The sizes of the scores and the mask as kernel arguments.
#[derive(CubeLaunch, CubeType)]
pub(crate) struct SoftmaxLayout {
    rows: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    left: usize,
    right: usize,
}

impl SoftmaxLayout {
    fn launch(plan: &SoftmaxProblem) -> SoftmaxLayoutLaunch {
        let [_, heads, queries, keys] = plan.shape;
        let (left, right) = match plan.span {
            KeyRange::Window { left, right } => (left, right),
            _ => (0, 0),
        };
        SoftmaxLayoutLaunch::new(plan.rows(), heads, queries, keys, left, right)
    }
}

default_fields!(SoftmaxLayoutCompilationArg [rows heads queries keys left right]);

/// Returns the keys that are visible to row `row`, without the mask tensor.
#[cube]
fn visible<N: Size>(
    layout: &SoftmaxLayout,
    lengths: &ComptimeOption<OwnedTensor<i32>>,
    row: usize,
    #[comptime] span: KeyRangeKind,
) -> VisibleVectors {
    let mut low = 0usize.runtime();
    let mut high = layout.keys;
    if comptime!(span == KeyRangeKind::Window) {
        // `queries` is added to both sides, so that no number is negative.
        let at = row % layout.queries + layout.keys;
        let reach = at + layout.right + 1;
        let past = layout.queries + layout.left;
        high = select(reach > layout.queries, reach - layout.queries, 0usize);
        high = min(high, layout.keys);
        low = min(select(at > past, at - past, 0usize), high);
    }
    #[comptime]
    match lengths {
        ComptimeOption::Some(lengths) => {
            let batch = row / (layout.queries * layout.heads);
            high = lengths.as_slice()[batch] as usize;
        }
        ComptimeOption::None => {}
    }
    let lanes = N::value();
    VisibleVectors {
        low,
        high,
        first: low / lanes,
        last: (high + lanes - 1) / lanes,
    }
}

/// The method that determines the visible range of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum KeyRangeKind {
    /// Every key is visible.
    All,
    /// The visible range is computed from the position of the row.
    Window,
    /// The visible range is computed from the length of the sequence.
    Lengths,
}

impl From<KeyRange> for KeyRangeKind {
    fn from(span: KeyRange) -> Self {
        match span {
            KeyRange::All => Self::All,
            KeyRange::Window { .. } => Self::Window,
            KeyRange::Lengths => Self::Lengths,
        }
    }
}

/// Returns the number of vectors of a row that each unit keeps. Returns 0 if the number exceeds `most`. In this case
/// the row is read twice.
fn register_vectors(plan: &RowPlan, most: usize) -> usize {
    let each = plan.columns.div_ceil(plan.units as usize);
    if each <= most { each } else { 0 }
}

/// Returns the element types of a launch: the float type, and the boolean type if there is a mask tensor.
fn types(float: &CubeTensor, hidden: Option<&CubeTensor>) -> [ElemType; 2] {
    let bool_bytes = match hidden {
        Some(hidden) => dtype_to_storage_type(hidden.dtype),
        None => ElemType::UInt(UIntKind::U32),
    };
    [dtype_to_storage_type(float.dtype), bool_bytes]
}

/// Adds the AOT instances of the operation.
pub(crate) fn aot_instances(list: &mut AotList) {
    forward::aot_instances(list);
    backward::aot_instances(list);
}
