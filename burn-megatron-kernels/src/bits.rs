//! Bit casts between 32-bit types, for code that moves tensors without computing with them.
//!
//! The casts are not differentiable: autodiff does not record them. They launch no kernel, because only the element
//! type changes.

use burn::backend::DispatchTensor;
use burn::backend::flex::FlexTensor;
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use crate::cpu::{slice, tensor};
use crate::error::{F32, U32, accept, check_type};
use crate::launch::{SimpleOp, Spec, launch_one};

const NAME: &str = "bits";

/// Reinterprets the bits of `words`, `[n]` of u32, as `[n]` of f32. Some bit patterns are NaN, so do not compare the
/// results as floats.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the words are not u32.
pub fn as_f32(words: Tensor<1, Int>) -> Tensor<1> {
    accept(check_type(NAME, "type", words.dtype(), U32));
    Tensor::from_dispatch(bitcast(words, DType::F32))
}

/// Reinterprets the bits of `values`, `[n]` of f32, as `[n]` of u32.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the values are not f32.
pub fn as_u32(values: Tensor<1>) -> Tensor<1, Int> {
    accept(check_type(NAME, "type", values.dtype(), F32));
    Tensor::from_dispatch(bitcast(values, DType::U32))
}

/// Reinterprets the bits of a tensor as type `to`.
fn bitcast<K: Basic>(x: Tensor<1, K>, to: DType) -> DispatchTensor {
    let op = SimpleOp {
        name: NAME,
        parameters: to,
        outputs: vec![Spec::new(x.shape(), to)],
        cpu: |to, inputs| vec![bitcast_on_cpu(&inputs[0], *to)],
        #[cfg(feature = "cubecl")]
        cube: |to, mut inputs| {
            let x = inputs.remove(0);
            vec![CubeTensor { dtype: *to, ..x }]
        },
    };
    launch_one(op, vec![x.into_dispatch()])
}

fn bitcast_on_cpu(x: &FlexTensor, to: DType) -> FlexTensor {
    let shape = x.layout().shape().clone();
    match to {
        DType::F32 => {
            let words = slice::<u32>(x).iter();
            tensor(words.map(|word| f32::from_bits(*word)).collect(), shape)
        }
        _ => {
            let values = slice::<f32>(x).iter();
            tensor(values.map(|x| x.to_bits()).collect(), shape)
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;

    #[test]
    fn bits_round_trip_also_those_of_nan() {
        let words = vec![0u32, 1, 0x7f80_0001, 0xffc0_1234, 0x3f80_0000, u32::MAX];
        let device = Device::flex();
        let data = TensorData::new(words.clone(), [6]);
        let tensor = Tensor::<1, Int>::from_data(data, (&device, DType::U32));
        let floats = as_f32(tensor);
        assert_eq!(floats.clone().narrow(0, 4, 1).into_scalar::<f32>(), 1.0);
        let back: Vec<u32> = as_u32(floats).into_data().try_into_vec().unwrap();
        assert_eq!(back, words);
    }

    #[test]
    #[should_panic(expected = "U32")]
    fn other_integers_are_refused() {
        let _ = as_f32(Tensor::<1, Int>::zeros([2], (&Device::flex(), DType::I64)));
    }
}
