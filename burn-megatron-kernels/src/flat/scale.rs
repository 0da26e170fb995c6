//! Scales a tensor by a factor on the device.

use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::KernelError;
use crate::cpu::{
    Element, ROW_GRAIN, Real, for_each_task, for_float, own, slice, slice_mut, vectorized,
};
use crate::error::{accept, check_shape, check_sum_type};
use crate::launch::{DeviceOp, InPlace, Spec, launch_one};

const NAME: &str = "scale";

/// Returns `x * factor`, where `factor` is a tensor on the device. `x` is updated in place if no other tensor shares
/// its memory.
///
/// - `x`: any shape, in f32, f64, f16 or bf16.
/// - `factor`: `[1]` in f32 (f64 for f64).
///
/// Each result is rounded once. If the factor is 1, no element is read or written. On CubeCL devices, the function
/// launches one kernel. If `x` is not contiguous or shares its memory with another tensor, it is copied first. The
/// function is not differentiable: autodiff does not record it.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the length or type of `factor` is wrong.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::flat::scale;
///
/// let device = Device::flex();
/// let x = scale(Tensor::<2>::ones([2, 3], &device), Tensor::from_floats([0.5], &device));
/// assert_eq!(x.sum().into_scalar::<f32>(), 3.0);
/// ```
pub fn scale<const D: usize>(x: Tensor<D>, factor: Tensor<1>) -> Tensor<D> {
    accept(check(&x, &factor));
    if x.shape().num_elements() == 0 {
        return x;
    }
    let inputs = vec![x.into_dispatch(), factor.into_dispatch()];
    Tensor::from_dispatch(launch_one(ScaleOp, inputs))
}

/// The scaling as a device operation. Its inputs are the tensor and the factor.
#[derive(Debug)]
struct ScaleOp;

impl DeviceOp for ScaleOp {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn in_place(&self) -> Option<InPlace> {
        Some(InPlace::FIRST)
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let x = inputs.remove(0);
        vec![for_float!(x.dtype(), E => scale_cpu::<E>(x, &inputs[0]))]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let x = inputs.remove(0);
        vec![super::kernel::scale(x, inputs.remove(0))]
    }
}

fn scale_cpu<E: Element>(x: FlexTensor, factor: &FlexTensor) -> FlexTensor {
    let factor = slice::<E::Wide>(factor)[0];
    if factor == E::Wide::ONE {
        return x;
    }
    let mut x = own::<E>(x);
    for_each_task(slice_mut::<E>(&mut x).chunks_mut(ROW_GRAIN), |part| {
        vectorized(
            #[inline(always)]
            || {
                part.iter_mut()
                    .for_each(|x| *x = E::narrow(x.wide() * factor))
            },
        );
    });
    x
}

fn check<const D: usize>(x: &Tensor<D>, factor: &Tensor<1>) -> Result<(), KernelError> {
    let [count] = factor.dims();
    check_shape(NAME, count == 1, || {
        format!("a factor of shape [{count}]: expected [1]")
    })?;
    check_sum_type(NAME, x.dtype(), "type of the factor", factor.dtype())
}
