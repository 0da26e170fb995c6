//! Soft caps, `cap tanh(x / cap)`, which limit the absolute value of scores and logits (as in Gemma 2).

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Tensor};

use crate::cpu::wide;
use crate::function::{Function, Gradients, Tensors, apply};

/// The input above which tanh rounds to 1 in f64. On some devices, tanh overflows for larger inputs.
const SATURATED: f64 = 20.0;

/// Computes `cap tanh(x / cap)` in f32 (f64 for f64) and returns it in the type of `x`. The backward pass saves only
/// the output.
pub fn soft_cap<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    apply(vec![x.into_dispatch()], SoftCap::<D> { cap })
}

/// Returns the derivative of [`soft_cap`] with respect to its input, `1 - (capped / cap)^2`, in f32 (f64 for f64).
/// `capped` is the output of [`soft_cap`].
pub fn soft_cap_slope<const D: usize>(capped: Tensor<D>, cap: f64) -> Tensor<D> {
    let wide = wide(capped.dtype());
    let share = capped.cast::<DType>(wide).div_scalar(cap);
    (share.clone() * share).neg().add_scalar(1.0)
}

#[derive(Debug)]
struct SoftCap<const D: usize> {
    cap: f64,
}

impl<const D: usize> Function for SoftCap<D> {
    fn forward(&self, mut inputs: Vec<DispatchTensor>) -> (DispatchTensor, Vec<DispatchTensor>) {
        let x = Tensor::<D>::from_dispatch(inputs.swap_remove(0));
        let dtype = x.dtype();
        let share = x.cast::<DType>(wide(dtype)).div_scalar(self.cap);
        let bounded = share.clamp(-SATURATED, SATURATED).tanh();
        let capped = bounded.mul_scalar(self.cap).cast::<DType>(dtype);
        let saved = capped.clone().into_dispatch();
        (capped.into_dispatch(), vec![saved])
    }

    fn backward(&self, mut saved: Tensors, gradient: DispatchTensor, _: &[bool]) -> Gradients {
        let capped = Tensor::<D>::from_dispatch(saved.swap_remove(0));
        let gradient = Tensor::<D>::from_dispatch(gradient);
        let dtype = gradient.dtype();
        let slope = soft_cap_slope(capped, self.cap);
        let gradient = (gradient.cast::<DType>(slope.dtype()) * slope).cast::<DType>(dtype);
        vec![Some(gradient.into_dispatch())]
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    /// Checks the value, and the gradient against finite differences.
    #[test]
    fn values_are_capped_and_gradients_are_those_of_differences() {
        let device = Device::flex();
        let values = |x: Tensor<1>| -> Vec<f64> { x.into_data().iter::<f64>().collect() };
        let at = [-1e6, -50.0, -3.0, 0.0, 0.25, 7.0, 1e6];
        let x = Tensor::<1>::from_data(TensorData::from(at), (&device, DType::F64));
        let (cap, step) = (5.0, 1e-6);
        let after = values(soft_cap(x.clone().add_scalar(step), cap));
        let before = values(soft_cap(x.clone().sub_scalar(step), cap));
        let leaf = Tensor::<1>::from_inner(x).require_grad();
        let capped = soft_cap(leaf.clone(), cap);
        let gradients = capped.clone().sum().backward();
        let slopes = values(leaf.grad(&gradients).unwrap());
        for (i, (x, y)) in at.iter().zip(values(capped.inner())).enumerate() {
            assert!((y - cap * (x / cap).tanh()).abs() < 1e-14, "{x}: {y}");
            let slope = (after[i] - before[i]) / (2.0 * step);
            assert!((slopes[i] - slope).abs() < 1e-8, "{x}: {slope}");
        }
    }
}
