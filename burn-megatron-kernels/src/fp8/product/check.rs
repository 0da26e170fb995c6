//! Input checks of products.

use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::KernelError;
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
        if given != fits {
            let message =
                format!("the bias is [{given}] beside b of {fits} rows: expected [{fits}]");
            return Err(KernelError::shape(MULTIPLY, message));
        }
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
    match flat.dtype() {
        DType::F32 | DType::F64 => Ok(()),
        other => {
            let (name, value) = ("type of the flat buffer", format!("{other:?}"));
            Err(KernelError::option(ACCUMULATE, name, value, "F32 or F64"))
        }
    }
}

fn factors(operation: &'static str, a: &Fp8Matrix, b: &Fp8Matrix) -> Result<(), KernelError> {
    a.check(operation, "a")?;
    b.check(operation, "b")?;
    if a.depth != b.depth {
        let sizes = |matrix: &Fp8Matrix| [matrix.rows(), matrix.depth];
        return Err(KernelError::shape(
            operation,
            format!(
                "a is {:?} and b {:?}: expected [m, depth] and [n, depth]",
                sizes(a),
                sizes(b)
            ),
        ));
    }
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
    if own == other {
        return Ok(());
    }
    let value = format!("{other:?} beside a on {own:?}");
    Err(KernelError::option(
        operation,
        name,
        value,
        "the device of a",
    ))
}
