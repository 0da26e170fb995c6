//! Soft caps: `cap tanh(x / cap)`, which bounds scores and logits (Gemma 2).

use burn::tensor::{DType, Tensor};

use crate::cpu::wide;

/// Where tanh is 1 to the last place of an f64; some devices overflow in tanh further out.
const SATURATED: f64 = 20.0;

/// `cap tanh(x / cap)` in the type of `x`, computed in f32 (f64 for f64).
pub fn soft_cap<const D: usize>(x: Tensor<D>, cap: f64) -> Tensor<D> {
    let dtype = x.dtype();
    let share = x.cast::<DType>(wide(dtype)).div_scalar(cap);
    let capped = share.clamp(-SATURATED, SATURATED).tanh().mul_scalar(cap);
    capped.cast(dtype)
}

/// The derivative of [`soft_cap`] where its value is `capped`, `1 - (capped / cap)^2`, in f32 (f64 for f64).
pub fn soft_cap_slope<const D: usize>(capped: Tensor<D>, cap: f64) -> Tensor<D> {
    let wide = wide(capped.dtype());
    let share = capped.cast::<DType>(wide).div_scalar(cap);
    (share.clone() * share).neg().add_scalar(1.0)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;

    use super::*;

    /// The value, and the slope against finite differences.
    #[test]
    fn values_are_capped_and_slopes_are_those_of_differences() {
        let options = (&Device::flex(), DType::F64);
        let values = |x: Tensor<1>| -> Vec<f64> { x.into_data().iter::<f64>().collect() };
        let at = [-1e6, -50.0, -3.0, 0.0, 0.25, 7.0, 1e6];
        let x = Tensor::<1>::from_data(burn::tensor::TensorData::from(at), options);
        let (cap, step) = (5.0, 1e-6);
        let capped = soft_cap(x.clone(), cap);
        let slopes = values(soft_cap_slope(capped.clone(), cap));
        let after = values(soft_cap(x.clone().add_scalar(step), cap));
        let before = values(soft_cap(x.sub_scalar(step), cap));
        for (i, (x, y)) in at.iter().zip(values(capped)).enumerate() {
            assert!((y - cap * (x / cap).tanh()).abs() < 1e-14, "{x}: {y}");
            let slope = (after[i] - before[i]) / (2.0 * step);
            assert!((slopes[i] - slope).abs() < 1e-8, "{x}: {slope}");
        }
    }
}
