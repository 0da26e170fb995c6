//! GELU (tanh approximation) as the epilogue of the matrix multiplications of an MLP.
//!
//! In the forward pass, the matrix multiplication before GELU stores the output and the input of GELU. In the backward
//! pass, the matrix multiplication for the gradient of the GELU output also multiplies the result by the derivative of
//! GELU, and sums the bias gradient.
//!
//! On CUDA, these matrix multiplications use the cuBLASLt epilogues `GELU_AUX_BIAS` and `DGELU_BGRAD`, so that the
//! activation needs no separate kernel. On other devices, and if cuBLASLt [rejects](check_gelu_epilogues) the
//! multiplication, the kernels of [`activation`](crate::activation) run after the multiplication. The operations are
//! not differentiable: autodiff does not record them.

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
    /// The output of GELU, `[rows, out]`. It is GELU applied to [`input`](Self::input).
    pub activated: Tensor<2>,
    /// The input of GELU, `[rows, out]`. It is `x weight + bias`. Save it for the backward pass.
    pub input: Tensor<2>,
}

/// Computes `gelu(x weight + bias)`: a linear layer followed by GELU (tanh approximation).
///
/// - `x`: `[rows, in]`.
/// - `weight`: `[in, out]`.
/// - `bias`: `[out]`.
///
/// All tensors have the same type. Sums and GELU are computed in f32 (f64 for f64), and each result is rounded once to
/// the type of the inputs. If the epilogue is not supported, GELU is computed from the rounded `x weight + bias`.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
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

/// Computes the gradient of the GELU input in an MLP in which a linear layer follows GELU.
///
/// The result is `gradient weight^T` times the derivative of GELU at `input`. With `with_bias`, the function also
/// returns the sum over the rows of the result, which is the gradient of the bias before GELU.
///
/// - `gradient`: `[rows, out]`, the gradient of the output of the linear layer.
/// - `weight`: `[width, out]`, the weight of the linear layer.
/// - `input`: `[rows, width]`, the input of GELU.
///
/// All input tensors and both results have the same type.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes or types do not match.
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

/// Checks whether a device supports the GELU epilogues in `dtype` for a linear layer with `inputs` input features and
/// `width` output features. GELU is applied to the output features.
///
/// # Errors
///
/// Returns a message with the unsupported property and the supported values.
pub fn check_gelu_epilogues(
    device: &Device,
    dtype: DType,
    [inputs, width]: [usize; 2],
) -> Result<(), String> {
    check_gelu_shape(dtype, width)?;
    check_on(device, dtype, [inputs, width])
}

/// Checks the requirements of the GELU epilogues that do not depend on the device.
///
/// # Errors
///
/// Returns a message with the unsupported property and the supported values.
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

/// The required alignment of the leading dimension of cuBLASLt's auxiliary matrix, in elements
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
