//! The CubeCL implementation. With [tensor cores](super::mma), one kernel computes all experts. Otherwise the experts
//! are computed one after the other.

use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Shape, Slice};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

use super::backward::{ProductOp, WeightGradientOp};
use super::{groups, mma};
use crate::cube::empty;
use crate::gemm::cube::multiply;
use crate::gemm::op::GemmOp;

/// Multiplies the rows `[rows, in]` of each expert by its weights `[experts, in, out]`.
pub(super) fn product(op: &ProductOp, mut inputs: Vec<CubeTensor>) -> CubeTensor {
    let (weights, x) = (inputs.remove(1), inputs.remove(0));
    if mma::takes_product(op, &x, &weights) {
        return mma::product(op, x, weights);
    }
    let x = into_contiguous(x);
    let rows = x.meta.shape()[0];
    let columns = weights.meta.shape()[2];
    // The weights are sliced without changing their layout in memory.
    let strides = weights.meta.strides();
    let exchanged = strides[1] < strides[2];
    let weights = if exchanged {
        permute(weights, &[0, 2, 1])
    } else {
        weights
    };
    let mut result = empty(&x, [rows, columns], x.dtype);
    for (expert, first, size) in with_rows(&op.group_sizes) {
        let [_, a, b] = [0, 1, 2].map(|dim| weights.meta.shape()[dim]);
        let weight = CubeBackend::float_slice(
            weights.clone(),
            &[range(expert, 1), range(0, a), range(0, b)],
        );
        let weight = CubeBackend::float_reshape(weight, Shape::from([a, b]));
        let weight = if exchanged {
            permute(weight, &[1, 0])
        } else {
            weight
        };
        let part = multiply(
            GemmOp::Linear { blas: None },
            vec![rows_of(&x, first, size), weight],
        );
        let place = [range(first, size), range(0, columns)];
        result = CubeBackend::float_slice_assign(result, &place, part);
    }
    result
}

/// Computes the gradient of the weights in the flat buffer.
pub(super) fn weight_gradient(op: &WeightGradientOp, mut inputs: Vec<CubeTensor>) -> CubeTensor {
    let mut flat = inputs.remove(2);
    let (gradient, x) = (inputs.remove(1), inputs.remove(0));
    if mma::takes_weight_gradient(op, &x, &gradient) {
        return mma::weight_gradient(op, x, gradient, flat);
    }
    let length = x.meta.shape()[1] * gradient.meta.shape()[1];
    for (expert, first, size) in groups(&op.group_sizes) {
        let product = GemmOp::WeightGradient {
            offset: op.offset + expert * length,
            add: op.add,
            blas: None,
        };
        let [x, gradient] = [&x, &gradient].map(|factor| rows_of(factor, first, size));
        flat = multiply(product, vec![x, gradient, flat]);
    }
    flat
}

fn with_rows(sizes: &[usize]) -> impl Iterator<Item = (usize, usize, usize)> {
    groups(sizes).filter(|(_, _, size)| *size > 0)
}

fn rows_of(x: &CubeTensor, first: usize, size: usize) -> CubeTensor {
    let columns = x.meta.shape()[1];
    if size == 0 {
        return empty(x, [0, columns], x.dtype);
    }
    CubeBackend::float_slice(x.clone(), &[range(first, size), range(0, columns)])
}

fn range(first: usize, size: usize) -> Slice {
    Slice::new(first as isize, Some((first + size) as isize), 1)
}
