//! Input checks of FP8 matrix multiplications.

use burn::tensor::{Device, FloatDType, Tensor};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::{check_option, check_shape};
use crate::flat::check_range;
use crate::fp8::matrix::Fp8Matrix;
use crate::launch::check_float;

const MULTIPLY: &str = "fp8::multiply";
const ACCUMULATE: &str = "fp8::accumulate_at";

pub(super) fn multiply(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    bias: Option<&Tensor<1>>,
    dtype: FloatDType,
) -> Result<(), KernelError> {
    factors(MULTIPLY, a, b)?;
    let device = a.codes.device();
    if let Some(bias) = bias {
        let (given, fits) = (bias.dims()[0], b.rows());
        check_shape(MULTIPLY, given == fits, || {
            format!("a bias [{given}] for b with {fits} rows: expected [{fits}]")
        })?;
        same_device(MULTIPLY, "device of the bias", &device, &bias.device())?;
    }
    check_float(MULTIPLY, dtype.into(), device.as_dispatch())
}

pub(super) fn accumulate_at(
    a: &Fp8Matrix,
    b: &Fp8Matrix,
    flat: &Tensor<1>,
    offset: usize,
) -> Result<(), KernelError> {
    factors(ACCUMULATE, a, b)?;
    check_range(ACCUMULATE, flat, offset, &[a.rows(), b.rows()])?;
    let device = a.codes.device();
    same_device(ACCUMULATE, "device of the buffer", &device, &flat.device())?;
    let (name, dtype) = ("type of the flat buffer", flat.dtype());
    let (fits, value) = (dtype == wide(dtype), format_args!("{dtype:?}"));
    check_option(ACCUMULATE, fits, name, value, "F32 or F64")
}

fn factors(operation: &'static str, a: &Fp8Matrix, b: &Fp8Matrix) -> Result<(), KernelError> {
    a.check(operation, "a")?;
    b.check(operation, "b")?;
    check_shape(operation, a.depth == b.depth, || {
        let [a, b] = [a, b].map(|matrix| [matrix.rows(), matrix.depth]);
        format!("a is {a:?} and b {b:?}: expected [m, depth] and [n, depth]")
    })?;
    same_device(
        operation,
        "device of b",
        &a.codes.device(),
        &b.codes.device(),
    )
}

fn same_device(
    operation: &'static str,
    name: &'static str,
    own: &Device,
    other: &Device,
) -> Result<(), KernelError> {
    let value = format_args!("{other:?} with a on {own:?}");
    check_option(operation, own == other, name, value, "the device of a")
}
