//! Input checks of products.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::KernelError;
use crate::flat::check_range;
use crate::fp8::format::Format;
use crate::fp8::matrix::{BLOCK, Fp8Matrix, Scales};
use crate::fp8::matrix::{mx_words, words};

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
    has_type(MULTIPLY, dtype.into(), &device)
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
        other => Err(KernelError::Option {
            operation: ACCUMULATE,
            name: "type of the flat buffer",
            value: format!("{other:?}"),
            fits: "F32 or F64",
        }),
    }
}

fn factors(operation: &'static str, a: &Fp8Matrix, b: &Fp8Matrix) -> Result<(), KernelError> {
    matrix(operation, "a", a)?;
    matrix(operation, "b", b)?;
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

/// The fields of a matrix are public: with mismatched sizes, kernels would read past the end.
fn matrix(
    operation: &'static str,
    name: &'static str,
    matrix: &Fp8Matrix,
) -> Result<(), KernelError> {
    let Fp8Matrix { format, depth, .. } = *matrix;
    if format == Format::E2M1 {
        return Err(KernelError::Option {
            operation,
            name: "format",
            value: format!("E2M1 of {name}"),
            fits: "E4M3 or E5M2",
        });
    }
    let rows = matrix.rows();
    let refused = |what: &str, given: &[usize], fits: &[usize]| {
        let message = format!(
            "{name} is [{rows}, {depth}] and its {what} {given:?}: expected {fits:?} (see Fp8Matrix)"
        );
        Err(KernelError::shape(operation, message))
    };
    let fits = [rows, words(depth)];
    if matrix.codes.dims() != fits {
        return refused("codes", &matrix.codes.dims(), &fits);
    }
    let (given, fits) = match &matrix.scales {
        Scales::Tensor(scale) => (scale.dims().to_vec(), vec![1]),
        Scales::Blocks { scales, height } => {
            if ![1, BLOCK].contains(height) {
                return Err(KernelError::Option {
                    operation,
                    name: "rows that share a scale",
                    value: format!("{height} of {name}"),
                    fits: "1 or 128",
                });
            }
            let fits = vec![rows.div_ceil(*height), depth.div_ceil(BLOCK)];
            (scales.dims().to_vec(), fits)
        }
        Scales::Mx(scales) => (scales.dims().to_vec(), vec![rows, mx_words(depth)]),
    };
    if given == fits {
        Ok(())
    } else {
        refused("scales", &given, &fits)
    }
}

fn same_device(
    operation: &'static str,
    name: &'static str,
    own: &Device,
    other: &Device,
) -> Result<(), KernelError> {
    if own == other {
        Ok(())
    } else {
        Err(KernelError::Option {
            operation,
            name,
            value: format!("{other:?} beside a on {own:?}"),
            fits: "the device of a",
        })
    }
}

fn has_type(operation: &'static str, dtype: DType, device: &Device) -> Result<(), KernelError> {
    // As everywhere in this crate f64 is a type of the CPU alone.
    let has = |dtype: DType| match dtype {
        DType::F64 => is_cpu(device.as_dispatch()),
        dtype => device.supports_dtype(dtype),
    };
    if has(dtype) {
        return Ok(());
    }
    let all = [DType::F64, DType::F32, DType::F16, DType::BF16];
    let fits = all.into_iter().filter(|dtype| has(*dtype));
    let fits: Vec<_> = fits.map(|dtype| format!("{dtype:?}")).collect();
    Err(KernelError::Type {
        operation,
        dtype,
        device: format!("{device:?}"),
        fits: fits.join(", "),
    })
}

fn is_cpu(device: &DispatchDevice) -> bool {
    match device {
        DispatchDevice::Autodiff(inner) => is_cpu(inner),
        DispatchDevice::Flex(_) => true,
        #[allow(unreachable_patterns)]
        _ => false,
    }
}
