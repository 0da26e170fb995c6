//! The CubeCL kernels. In the first kernel, a cube adds the lookups of a segment. For ids with several segments, a
//! second kernel adds the sums of the segments.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::AccumulateRowsOp;
use super::table::{SEGMENT, SPLIT, SegmentTable, WHOLE};
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, empty, launch, own, upload};
use crate::launch::exactly;

/// The maximum number of units per cube.
const MAX_UNITS: u32 = 256;
/// The number of rows that a unit loads at the same time.
const AHEAD: u32 = 4;

/// The sizes of rows, in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct RowSizes {
    columns: usize,
    units: u32,
}

impl RowSizes {
    fn new(columns: usize) -> Self {
        let units = (columns.next_power_of_two() as u32).clamp(32, MAX_UNITS);
        Self { columns, units }
    }
}

/// Adds the lookups of a segment in order. The sum goes to the flat buffer, or to a partial sum if the id has several
/// segments. The gradient of the table begins at vector `origin` of the flat buffer. The segments in `table` begin at
/// `segments`.
#[cube(launch_unchecked)]
fn segments_kernel<G: Float, F: Float, N: Size>(
    gradient: &Tensor<Vector<G, N>>,
    table: &Tensor<u32>,
    flat: &mut Tensor<Vector<F, N>>,
    parts: &mut Tensor<Vector<f32, N>>,
    segments: u32,
    count: u32,
    origin: u32,
    #[comptime] sizes: RowSizes,
    #[define(G, F)] _types: [ElemType; 2],
) {
    let segment = CUBE_POS as u32;
    if segment < count {
        let columns = comptime!(sizes.columns);
        let at = (segments + segment * comptime!(SEGMENT as u32)) as usize;
        let first = table[at];
        let end = first + table[at + 1];
        let row = table[at + 2];
        let part = table[at + 3];
        let mut column = UNIT_POS as usize;
        while column < columns {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut lookup = first;
            // Several loads come before the first addition, so that they share one wait.
            while lookup + AHEAD <= end {
                let mut loaded = Array::<Vector<G, N>>::new(comptime!(AHEAD as usize));
                #[unroll]
                for i in 0..AHEAD {
                    let from = table[(lookup + i) as usize] as usize;
                    loaded[i as usize] = gradient[from * columns + column];
                }
                #[unroll]
                for i in 0..AHEAD {
                    sum += Vector::cast_from(loaded[i as usize]);
                }
                lookup += AHEAD;
            }
            while lookup < end {
                let from = table[lookup as usize] as usize;
                sum += Vector::cast_from(gradient[from * columns + column]);
                lookup += 1;
            }
            if part == WHOLE {
                let to = origin as usize + row as usize * columns + column;
                flat[to] = Vector::cast_from(sum + Vector::cast_from(flat[to]));
            } else {
                parts[part as usize * columns + column] = sum;
            }
            column += comptime!(sizes.units as usize);
        }
    }
}

/// Adds the partial sums of an id in order, and adds the result to the flat buffer. The ids with several segments begin
/// at `splits` in `table`.
#[cube(launch_unchecked)]
fn parts_kernel<F: Float, N: Size>(
    parts: &Tensor<Vector<f32, N>>,
    table: &Tensor<u32>,
    flat: &mut Tensor<Vector<F, N>>,
    splits: u32,
    count: u32,
    origin: u32,
    #[comptime] sizes: RowSizes,
    #[define(F)] _dtype: ElemType,
) {
    let split = CUBE_POS as u32;
    if split < count {
        let columns = comptime!(sizes.columns);
        let at = (splits + split * comptime!(SPLIT as u32)) as usize;
        let first = table[at];
        let end = first + table[at + 1];
        let row = table[at + 2];
        let mut column = UNIT_POS as usize;
        while column < columns {
            let mut sum = Vector::<f32, N>::new(0.0f32);
            let mut part = first;
            while part < end {
                sum += parts[part as usize * columns + column];
                part += 1;
            }
            let to = origin as usize + row as usize * columns + column;
            flat[to] = Vector::cast_from(sum + Vector::cast_from(flat[to]));
            column += comptime!(sizes.units as usize);
        }
    }
}

/// Adds the gradient rows. See [`accumulate_rows`](super::accumulate_rows).
pub(super) fn accumulate_rows(op: &AccumulateRowsOp, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let [gradient, flat] = exactly(inputs);
    let flat = own(flat);
    let table = SegmentTable::new(&op.lookups, op.found.clone(), op.first_row);
    let numbers = upload(&gradient, &table.numbers);
    let client = gradient.client.clone();
    // A power of two divides the bitwise or of two numbers only if it divides both numbers.
    let vector = RowPlan::new(&client, gradient.dtype, op.width | op.offset).vector;
    let sizes = RowSizes::new(op.width / vector);
    let origin = (op.offset / vector) as u32;
    let parts = empty(&gradient, [table.parts.max(1), op.width], DType::F32);
    let types = [gradient.dtype, flat.dtype].map(dtype_to_storage_type);
    // SAFETY: the table contains only existing lookups and rows, and its segments and parts do not overlap.
    unsafe {
        launch!(
            segments_kernel,
            [client, table.segments, sizes.units],
            [vector],
            [gradient, &numbers, &flat, &parts],
            (table.lookups as u32, table.segments as u32, origin),
            (sizes, types)
        );
    }
    let splits = table.lookups + table.segments * SEGMENT;
    if table.splits > 0 {
        // SAFETY: as above.
        unsafe {
            launch!(
                parts_kernel,
                [client, table.splits, sizes.units],
                [vector],
                [parts, numbers, &flat],
                (splits as u32, table.splits as u32, origin),
                (sizes, types[1])
            );
        }
    }
    vec![flat]
}

/// Adds AOT instances for the embeddings of GPT-2 124M and XL, with sums in f32.
pub(crate) fn aot_instances(list: &mut AotList) {
    let [(_, single, _), ..] = types();
    for (name, dtype, vector) in types() {
        for width in [768, 1600] {
            let sizes = RowSizes::new(width / vector);
            // Rows are gathered, so their indices are read one by one.
            instance!(
                list.other("embedding/segments/{name}/{width}"), sizes.units,
                segments_kernel::SegmentsKernel [_ _ _ _ _ _ _] (vector, sizes, [dtype, single])
            );
            instance!(
                list.other("embedding/parts/{vector}/{name}/{width}"), sizes.units,
                parts_kernel::PartsKernel [_ _ _ _ _ _] (vector, sizes, single)
            );
        }
    }
}
