//! The CubeCL kernels: one cube works on one row.
//!
//! A row that a cube can hold in registers is read once; a longer one is read a second time, after
//! one pass that keeps a running maximum and sum. Vectors of keys that a row does not see are not
//! read; zeros are written there.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::*;

use super::{Plan, SinkKind, Span};
use crate::cube::specimen::{Specimen, Target};
use crate::cube::{Reduction, RowPlan};

mod backward;
mod forward;

pub(super) use backward::backward;
pub(super) use forward::forward;

/// The lowest finite value: a score that is not above it counts as hidden.
const LOWEST: f32 = f32::MIN;

/// The keys from `low` to before `high`, as the vectors from `first` to before `last`.
#[derive(CubeType)]
struct Seen {
    low: usize,
    high: usize,
    first: usize,
    last: usize,
}

/// Sizes and positions, as the kernels take them.
#[derive(CubeLaunch, CubeType)]
pub(crate) struct Layout {
    rows: usize,
    heads: usize,
    queries: usize,
    keys: usize,
    left: usize,
    right: usize,
}

impl Layout {
    fn launch(plan: &Plan) -> LayoutLaunch {
        let [_, heads, queries, keys] = plan.shape;
        let (left, right) = match plan.span {
            Span::Window { left, right } => (left, right),
            _ => (0, 0),
        };
        LayoutLaunch::new(plan.rows(), heads, queries, keys, left, right)
    }

    /// What a kernel's `new` takes.
    fn compiled() -> LayoutCompilationArg {
        LayoutCompilationArg {
            rows: (),
            heads: (),
            queries: (),
            keys: (),
            left: (),
            right: (),
        }
    }
}

/// What row `row` sees, apart from single keys that are hidden.
#[cube]
fn seen<N: Size>(
    layout: &Layout,
    lengths: &ComptimeOption<OwnedTensor<i32>>,
    row: usize,
    #[comptime] span: SpanKind,
) -> Seen {
    let mut low = 0usize.runtime();
    let mut high = layout.keys;
    if comptime!(span == SpanKind::Window) {
        // Both sides plus `queries`, so that nothing is negative.
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
    Seen {
        low,
        high,
        first: low / lanes,
        last: (high + lanes - 1) / lanes,
    }
}

/// How a row's span is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SpanKind {
    /// Every key.
    All,
    /// By position.
    Window,
    /// By the lengths.
    Lengths,
}

impl From<Span> for SpanKind {
    fn from(span: Span) -> Self {
        match span {
            Span::All => Self::All,
            Span::Window { .. } => Self::Window,
            Span::Lengths => Self::Lengths,
        }
    }
}

/// Vectors of a row per unit if no more than `most` of them are to be held, else 0.
fn held(plan: &RowPlan, most: usize) -> usize {
    let each = plan.columns.div_ceil(plan.units as usize);
    if each <= most { each } else { 0 }
}

fn planes(plan: &RowPlan) -> bool {
    plan.reduction == Reduction::Planes
}

/// The element types of a launch: floats, and truth values where there are any.
fn types(float: &CubeTensor, hidden: Option<&CubeTensor>) -> [ElemType; 2] {
    let truth = match hidden {
        Some(hidden) => dtype_to_storage_type(hidden.dtype),
        None => ElemType::UInt(UIntKind::U32),
    };
    [dtype_to_storage_type(float.dtype), truth]
}

fn optional<T>(tensor: Option<CubeTensor>) -> ComptimeOptionArgs<OwnedTensor<T>>
where
    T: CubePrimitive,
{
    tensor.map(CubeTensor::into_tensor_arg).into()
}

/// Every kernel of the operation.
pub(crate) fn specimens(target: &Target) -> Vec<Specimen> {
    let mut all = forward::specimens(target);
    all.extend(backward::specimens(target));
    all
}
