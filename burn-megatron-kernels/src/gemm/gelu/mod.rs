//! GELU (tanh approximation) as the epilogue of the adjacent products of an MLP.
//!
//! The product before GELU stores its activated output, and also its output before GELU, from which
//! the backward computes the derivative of GELU. In the backward, the product after GELU multiplies
//! its input gradient by that derivative and sums the bias gradient.
//!
//! On CUDA these are the epilogues `GELU_AUX_BIAS` and `DGELU_BGRAD` of cuBLASLt, so that the
//! activation needs no launch. On other devices, and if cuBLASLt [rejects](check_gelu_epilogues)
//! the product, the kernels of [`activation`](crate::activation) run after the products. The
//! operations are not differentiable: nothing is recorded for autodiff.

use burn::tensor::{DType, Device, Tensor};

use super::{check_linear, linear};
use crate::activation::{Activation, ActivationFunction};
use crate::column_sum::column_sum;
use crate::error::{accept, check_same_type, check_shape};
use crate::{Function, KernelError};

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod tests;

const GRADIENT: &str = "gelu_gradient";

/// The result of [`linear_gelu`].
#[derive(Clone, Debug)]
pub struct GeluOutput {
    /// GELU of [`input`](Self::input), `[rows, out]`.
    pub activated: Tensor<2>,
    /// `x weight + bias`, saved for the backward, `[rows, out]`.
    pub input: Tensor<2>,
}

/// Computes `x weight + bias`, and GELU (tanh approximation) of the sum.
///
/// - `x`: `[rows, in]`.
/// - `weight`: `[in, out]`.
/// - `bias`: `[out]`.
///
/// All tensors have the same type. Sums and GELU are computed in f32 (f64 for f64), and each result
/// is rounded once to the type. Without the epilogue, GELU is computed from the rounded input.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not agree.
pub fn linear_gelu(x: Tensor<2>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> GeluOutput {
    accept(check_linear(&x, &weight, bias.as_ref()));
    #[cfg(feature = "cuda")]
    if let Some(output) = cuda::linear_gelu(&x, &weight, bias.as_ref()) {
        return output;
    }
    let input = linear(x, weight, bias);
    let (activated, _) = activation().forward(vec![input.clone().into_dispatch()]);
    GeluOutput {
        activated: Tensor::from_dispatch(activated),
        input,
    }
}

/// Computes the gradient of the input of GELU from the gradient of the output of the following
/// product: `gradient weight^T` times the derivative of GELU at `input`. With `with_bias`, also
/// returns the sum of its rows, which is the gradient of a bias in `input`.
///
/// - `gradient`: `[rows, out]`.
/// - `weight`: `[width, out]`.
/// - `input`: `[rows, width]`.
///
/// All tensors and both results have the same type.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not agree.
pub fn gelu_gradient(
    gradient: Tensor<2>,
    weight: Tensor<2>,
    input: Tensor<2>,
    with_bias: bool,
) -> (Tensor<2>, Option<Tensor<1>>) {
    accept(check_gradient(&gradient, &weight, &input));
    #[cfg(feature = "cuda")]
    if let Some(gradients) = cuda::gelu_gradient(&gradient, &weight, &input, with_bias) {
        return gradients;
    }
    let product = linear(gradient, weight.transpose(), None).into_dispatch();
    let saved = vec![input.into_dispatch()];
    let gradients = activation().backward(saved, product, &[true]);
    let Some(gradient) = gradients.into_iter().flatten().next() else {
        unreachable!("the gradient of the input was requested")
    };
    let gradient = Tensor::<2>::from_dispatch(gradient);
    let bias = with_bias.then(|| {
        let sum = column_sum(gradient.clone(), None);
        sum.cast::<DType>(gradient.dtype())
    });
    (gradient, bias)
}

/// Checks whether a device has these epilogues for products in `dtype` between `inputs` and `width`
/// features. `width` is the number of features of GELU.
///
/// # Errors
///
/// Returns the unsupported property and the supported values.
pub fn check_gelu_epilogues(
    device: &Device,
    dtype: DType,
    [inputs, width]: [usize; 2],
) -> Result<(), String> {
    check_gelu_shape(dtype, width)?;
    check_on(device, dtype, [inputs, width])
}

/// Checks the requirements that apply to all devices.
///
/// # Errors
///
/// Returns the unsupported property and the supported values.
pub fn check_gelu_shape(dtype: DType, width: usize) -> Result<(), String> {
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(format!(
            "the fused epilogues require F32, F16 or BF16, got {dtype:?}"
        ));
    }
    if width.is_multiple_of(WIDTH_MULTIPLE) {
        Ok(())
    } else {
        Err(format!(
            "the width on a rank is {width}: expected a multiple of {WIDTH_MULTIPLE}, as {} or {}",
            width / WIDTH_MULTIPLE * WIDTH_MULTIPLE,
            width.next_multiple_of(WIDTH_MULTIPLE)
        ))
    }
}

/// The alignment of the leading dimension of cuBLASLt's auxiliary matrix, in elements
/// (`CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD`).
const WIDTH_MULTIPLE: usize = 8;

#[cfg(feature = "cuda")]
fn check_on(device: &Device, dtype: DType, sizes: [usize; 2]) -> Result<(), String> {
    cuda::check(device, dtype, sizes)
}

#[cfg(not(feature = "cuda"))]
fn check_on(device: &Device, _dtype: DType, _sizes: [usize; 2]) -> Result<(), String> {
    Err(only_cuda(device))
}

fn only_cuda(device: &Device) -> String {
    format!("the fused epilogues require a CUDA device and the feature `cuda`, got {device:?}")
}

fn activation() -> ActivationFunction {
    ActivationFunction::new(Activation::GeluTanh, None)
}

fn check_gradient(
    gradient: &Tensor<2>,
    weight: &Tensor<2>,
    input: &Tensor<2>,
) -> Result<(), KernelError> {
    let ([rows, out], [width, outputs]) = (gradient.dims(), weight.dims());
    let of_input = input.dims();
    let fits = out == outputs && of_input == [rows, width];
    check_shape(GRADIENT, fits, || {
        format!(
            "the gradient is [{rows}, {out}], the weight [{width}, {outputs}], the input {of_input:?}: expected \
             [rows, out], [width, out] and [rows, width]"
        )
    })?;
    let dtype = gradient.dtype();
    check_same_type(GRADIENT, dtype, "type of the weight", weight.dtype())?;
    check_same_type(GRADIENT, dtype, "type of the input", input.dtype())
}
