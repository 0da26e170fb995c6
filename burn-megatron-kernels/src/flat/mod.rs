//! Operations that write to a flat buffer, which holds many tensors at different offsets.
//!
//! The gradients of many parameters share one buffer, so that they can be reduced and updated together. [`accumulate`]
//! converts a gradient to the type of the buffer and writes or adds it in one pass. [`clear`] writes zeros to ranges of
//! the buffer. [`scale`] multiplies gradients by a factor. The factor is usually 1, and the gradients are then not read
//! or written. If a gradient is the result of a matrix multiplication,
//! [`gemm::accumulate_weight_gradient_at`](crate::gemm::accumulate_weight_gradient_at) writes it without an
//! intermediate tensor.
//!
//! The operations are not differentiable: autodiff does not record them.

use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::{accept, check_option, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

mod clear;
pub mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod scale;
#[cfg(test)]
mod tests;

pub use clear::{Ranges, clear};
pub use scale::scale;

const NAME: &str = "accumulate";

/// Writes `values` to `flat`, starting at element `offset`. If `add` is true, adds the values to the existing elements.
///
/// `flat` is `[length]` in f32, f64, f16 or bf16. It is updated in place if no other tensor shares its memory, and
/// otherwise copied. `values` is `[count]` in the type of `flat`. If `flat` is f32, `values` may also be f16 or bf16.
/// `count` may be 0. 16-bit sums are computed in f32 and rounded once.
///
/// On CubeCL devices, the function launches one kernel. Values that are not contiguous are copied first. The kernel
/// moves 128 bits at a time if `offset` and `count` are multiples of the number of elements in 128 bits.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the values extend beyond the end of the buffer, or if the types do not match.
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
    accept(check_range(NAME, &flat, offset, &[count]));
    accept(check_types(flat.dtype(), values.dtype()));
    if count == 0 {
        return flat;
    }
    let op = SimpleOp {
        name: NAME,
        parameters: (offset, add),
        outputs: vec![Spec::of(&flat)],
        cpu: |&(offset, add), mut inputs| {
            let flat = inputs.remove(0);
            vec![cpu::accumulate(flat, offset, &inputs[0], add)]
        },
        #[cfg(feature = "cubecl")]
        cube: |&(offset, add), mut inputs| {
            let flat = inputs.remove(0);
            vec![kernel::accumulate(flat, offset, inputs.remove(0), add)]
        },
    };
    let inputs = vec![flat.into_dispatch(), values.into_dispatch()];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// Returns an error if the range of a tensor of this shape exceeds the buffer.
pub(crate) fn check_range(
    operation: &'static str,
    flat: &Tensor<1>,
    offset: usize,
    shape: &[usize],
) -> Result<(), KernelError> {
    let [length] = flat.dims();
    let dims = shape.iter().copied();
    let count = dims.fold(1, usize::saturating_mul);
    let needed = offset.saturating_add(count);
    check_shape(operation, needed <= length, || {
        format!(
            "{count} elements from element {offset} on reach past a flat buffer of {length}: expected at least {needed}"
        )
    })
}

fn check_types(flat: DType, values: DType) -> Result<(), KernelError> {
    let expected = match flat {
        DType::F64 => "F64",
        DType::F32 => "F32, F16 or BF16",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        other => {
            let (name, value) = ("type of the flat buffer", format_args!("{other:?}"));
            return check_option(NAME, false, name, value, "F64, F32, F16 or BF16");
        }
    };
    let fits = values == flat || values.is_float() && wide(values) == flat;
    let value = format_args!("{values:?} with a flat buffer in {flat:?}");
    check_option(NAME, fits, "type of the values", value, expected)
}
