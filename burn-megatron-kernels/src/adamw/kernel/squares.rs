//! Sums of squares, computed in two launches. The first launch computes one sum per group of a fixed size, the second
//! launch adds these sums.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, cube_sum, empty, lane_sum, launch};

/// The number of units of the cube that sums one group.
const UNITS: u32 = 256;

/// The number of vectors per unit.
const VECTORS: u32 = 8;

/// The number of units of the single cube that sums the groups.
const LAST_UNITS: u32 = 256;

#[cube(launch_unchecked)]
fn squares_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    sums: &mut [f32],
    first: u32,
    groups: u32,
    vectors: u32,
    #[comptime] planes: bool,
    #[define(F)] _dtype: ElemType,
) {
    let group = CUBE_POS;
    if group < groups as usize {
        let start = group * (UNITS * VECTORS) as usize + UNIT_POS as usize;
        let mut sum = Vector::<f32, N>::new(0.0);
        #[unroll]
        for i in 0..VECTORS {
            let at = start + (i * UNITS) as usize;
            if at < vectors as usize {
                let value = Vector::<f32, N>::cast_from(x[at]);
                sum += value * value;
            }
        }
        let total = cube_sum(lane_sum(sum), UNITS, planes);
        if UNIT_POS == 0 {
            sums[first as usize + group] = total;
        }
    }
}

#[cube(launch_unchecked)]
fn total_kernel(sums: &[f32], total: &mut [f32], groups: u32, #[comptime] planes: bool) {
    let mut sum = 0.0f32;
    let mut at = UNIT_POS;
    while at < groups {
        sum += sums[at as usize];
        at += LAST_UNITS;
    }
    let all = cube_sum(sum, LAST_UNITS, planes);
    if UNIT_POS == 0 {
        total[0] = all;
    }
}

/// Computes the sum of squares of buffers, which may differ in type and length.
pub(in crate::adamw) fn sum_of_squares(inputs: Vec<CubeTensor>) -> CubeTensor {
    let like = inputs[0].clone();
    let client = like.client.clone();
    let plan = |x: &CubeTensor| RowPlan::new(&client, x.dtype, x.shape().num_elements());
    let groups = |x: &CubeTensor| plan(x).columns.div_ceil((UNITS * VECTORS) as usize);
    let count: usize = inputs.iter().map(groups).sum();
    let sums = empty(&like, [count.max(1)], DType::F32);
    let total = empty(&like, [1], DType::F32);
    let planes = plan(&like).planes();
    let mut first = 0;
    for x in inputs {
        let (plan, groups) = (plan(&x), groups(&x));
        if groups == 0 {
            continue;
        }
        let dtype = dtype_to_storage_type(x.dtype);
        unsafe {
            launch!(
                squares_kernel,
                [client, groups, UNITS],
                [plan.vector],
                [x, &sums],
                (first as u32, groups as u32, plan.columns as u32),
                (planes, dtype)
            );
        }
        first += groups;
    }
    unsafe {
        launch!(
            total_kernel,
            [client, 1, LAST_UNITS],
            [],
            [sums, &total],
            (count as u32),
            (planes)
        );
    }
    total
}

pub(super) fn aot_instances(list: &mut AotList) {
    for (name, dtype, vector) in types() {
        instance!(
            list.streaming("sum_of_squares/{name}"), UNITS,
            squares_kernel::SquaresKernel [_ _ _ _ _] (vector, true, dtype)
        );
    }
    instance!(
        list.other("sum_of_squares/total"), LAST_UNITS,
        total_kernel::TotalKernel [_ _ _] (true)
    );
}
