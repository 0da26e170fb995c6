//! The CubeCL kernel. A unit computes one vector of a row of the result.

use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::GatherSizes;
use crate::cube::instance::{AotList, instance, types};
use crate::cube::{RowPlan, empty, launch};
use crate::launch::exactly;

/// The number of units per cube.
const UNITS: u32 = 256;

#[cube(launch_unchecked)]
fn gather_kernel<F: Float, N: Size>(
    x: &Tensor<Vector<F, N>>,
    index: &Tensor<i32>,
    output: &mut Tensor<Vector<F, N>>,
    vectors: u32,
    columns: u32,
    terms: u32,
    divisor: u32,
    #[define(F)] _dtype: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < vectors as usize {
        let row = at as u32 / columns;
        let column = at as u32 % columns;
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for term in 0..terms {
            let from = index[(row * terms + term) as usize];
            if from >= 0i32 {
                let from = from as u32 / divisor * columns + column;
                sum += Vector::cast_from(x[from as usize]);
            }
        }
        output[at] = Vector::cast_from(sum);
    }
}

/// Computes the gathered sums. The inputs are the rows and the indices. `shape` is the shape of the result.
pub(super) fn gather(sizes: GatherSizes, shape: &[usize], inputs: Vec<CubeTensor>) -> CubeTensor {
    let [x, index] = exactly(inputs);
    let client = x.client.clone();
    let output = empty(&x, shape.to_vec(), x.dtype);
    if sizes.rows * sizes.width == 0 {
        return output;
    }
    let nothing = x.meta.shape().num_elements() * index.meta.shape().num_elements() == 0;
    if nothing {
        // The input is empty, so every sum is 0.
        return burn_cubecl::ops::numeric::zeros_client(
            client,
            x.device.clone(),
            shape.to_vec().into(),
            x.dtype,
        );
    }
    let vector = RowPlan::new(&client, x.dtype, sizes.width).vector;
    let columns = sizes.width / vector;
    let vectors = sizes.rows * columns;
    let dtype = dtype_to_storage_type(x.dtype);
    // SAFETY: a unit past the result accesses no memory, and indices come from a map.
    unsafe {
        launch!(
            gather_kernel,
            [client, vectors.div_ceil(UNITS as usize), UNITS],
            [vector],
            [x, index, &output],
            (vectors as u32, columns as u32),
            (sizes.terms as u32, sizes.divisor as u32),
            (dtype)
        );
    }
    output
}

/// Adds AOT instances for rows that consist of complete vectors, and for weights.
pub(crate) fn aot_instances(list: &mut AotList) {
    for (name, dtype, vector) in types() {
        for vector in [vector, 1] {
            // The rows are gathered, so the kernel reads their indices one by one.
            instance!(
                list.other("moe/gather/{name}/{vector}"), UNITS,
                gather_kernel::GatherKernel [_ _ _ _ _ _ _] (vector, dtype)
            );
        }
    }
}
