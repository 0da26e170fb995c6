//! The Newton-Schulz iteration, with which Muon orthogonalizes a matrix.

use burn::tensor::Tensor;

/// The coefficients of the quintic polynomial. They maximize its slope at 0, while the singular values end up
/// near 1.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.775, 2.0315];

/// The lower bound of the norm in the division.
const EPSILON: f64 = 1e-7;

/// Orthogonalizes a matrix approximately with the Newton-Schulz iteration. The result has the singular vectors of
/// `matrix`, and its singular values are between about 0.7 and 1.2. The iteration starts with `x = matrix / norm`. Each
/// of the `steps` iterations computes `x = a x + (b (x x^T) + c (x x^T)^2) x`, in the dtype of the matrix. 5 iterations
/// are usual. A zero matrix stays zero.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::optim::orthogonalize;
///
/// let matrix = Tensor::<2>::eye(4, &Device::flex()).mul_scalar(7.0);
/// let update = orthogonalize(matrix, 5);
/// // The singular values of a multiple of the identity are its diagonal.
/// let largest = update.max().into_scalar::<f32>();
/// assert!((0.6..1.3).contains(&largest));
/// ```
pub fn orthogonalize(matrix: Tensor<2>, steps: usize) -> Tensor<2> {
    let [rows, columns] = matrix.dims();
    let transposes = rows > columns;
    let mut x = if transposes {
        matrix.transpose()
    } else {
        matrix
    };
    let norm = x.clone().square().sum().sqrt().clamp_min(EPSILON);
    x = x.div(norm.unsqueeze());
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..steps {
        let gram = x.clone().matmul(x.clone().transpose());
        let square = gram.clone().matmul(gram.clone());
        let polynomial = gram.mul_scalar(b) + square.mul_scalar(c);
        x = x.clone().mul_scalar(a) + polynomial.matmul(x);
    }
    if transposes { x.transpose() } else { x }
}
