//! Writing into a flat buffer that holds many tensors, each at an offset of its own.
//!
//! The gradients of many parameters lie in one buffer, so that they are reduced and stepped
//! together. [`accumulate`] brings one of them there: widened, written over what is there or added
//! to it, in one pass. Where a gradient is a product of matrices,
//! [`gemm::accumulate_weight_gradient_at`](crate::gemm::accumulate_weight_gradient_at) needs no
//! values to bring. Nothing here is recorded for a backward.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::KernelError;
use crate::cpu::wide;
use crate::error::accept;
use crate::launch::{Kernel, Spec, launch_one};

pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

const NAME: &str = "accumulate";

/// `flat` with `values` written over its elements from `offset` on, or, where `add` says so, added
/// to them: `flat[offset + i] (+)= values[i]`.
///
/// `flat` is `[length]` in f32, f64, f16 or bf16, and written to in place where nobody else holds
/// it, copied otherwise. `values` is `[count]` of the type of `flat`, or f16 or bf16 beside f32. A
/// count of 0 is legal. 16-bit sums are made in f32 and rounded once.
///
/// On CubeCL devices this is one launch, after a copy of values that do not lie side by side. It
/// moves 128 bits at a time where `offset` and `count` are multiples of as many elements.
///
/// # Panics
///
/// With a [`KernelError`] for a stretch that reaches past the buffer, and for types that do not
/// agree.
///
/// # Example
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_megatron_kernels::flat::accumulate;
///
/// let device = Device::flex();
/// let flat = Tensor::<1>::zeros([6], &device);
/// let gradient = Tensor::<1>::ones([3], (&device, DType::BF16));
/// let flat = accumulate(flat, 2, gradient.clone(), false);
/// let flat = accumulate(flat, 2, gradient, true);
/// let values: Vec<f32> = flat.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [0.0, 0.0, 2.0, 2.0, 2.0, 0.0]);
/// ```
pub fn accumulate(flat: Tensor<1>, offset: usize, values: Tensor<1>, add: bool) -> Tensor<1> {
    let [count] = values.dims();
    accept(check_stretch(NAME, &flat, offset, &[count]));
    accept(check_types(flat.dtype(), values.dtype()));
    if count == 0 {
        return flat;
    }
    let inputs = vec![flat.into_dispatch(), values.into_dispatch()];
    Tensor::from_dispatch(launch_one(Accumulate { offset, add }, inputs))
}

/// Inputs: the buffer and the values.
#[derive(Debug)]
struct Accumulate {
    offset: usize,
    add: bool,
}

impl Kernel for Accumulate {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let flat = inputs.remove(0);
        vec![cpu::accumulate(flat, self.offset, &inputs[0], self.add)]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let flat = inputs.remove(0);
        let values = inputs.remove(0);
        vec![kernel::accumulate(flat, self.offset, values, self.add)]
    }
}

/// Refuses a stretch for a tensor of this shape that reaches past the buffer.
pub(crate) fn check_stretch(
    operation: &'static str,
    flat: &Tensor<1>,
    offset: usize,
    shape: &[usize],
) -> Result<(), KernelError> {
    let [length] = flat.dims();
    let dims = shape.iter().copied();
    let count = dims.fold(1, usize::saturating_mul);
    let needed = offset.saturating_add(count);
    match needed <= length {
        true => Ok(()),
        false => Err(KernelError::shape(
            operation,
            format!(
                "{count} elements from element {offset} on reach past a flat buffer of {length}; \
                 one of at least {needed} is needed"
            ),
        )),
    }
}

fn check_types(flat: DType, values: DType) -> Result<(), KernelError> {
    let option = |name, value, fits| {
        Err(KernelError::Option {
            operation: NAME,
            name,
            value,
            fits,
        })
    };
    let fits = match flat {
        DType::F64 => "F64",
        DType::F32 => "F32, F16 or BF16",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        other => {
            let value = format!("{other:?}");
            return option("type of the flat buffer", value, "F64, F32, F16 or BF16");
        }
    };
    match values == flat || values.is_float() && wide(values) == flat {
        true => Ok(()),
        false => option(
            "type of the values",
            format!("{values:?} beside a flat buffer in {flat:?}"),
            fits,
        ),
    }
}
