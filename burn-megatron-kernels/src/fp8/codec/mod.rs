//! Codes of many values, packed.

use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, FloatDType, Int, Tensor};
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::Format;
use crate::launch::{Kernel, Spec, launch_one};

mod cpu;

/// The codes of `values`, `[count]`: `[ceil(count bits / 32)]` of u32, the first in the lowest bits;
/// what is left of the last word is 0.
pub fn encode(values: Tensor<1>, format: Format) -> Tensor<1, Int> {
    let values = match values.dtype() {
        DType::F64 => values.cast(FloatDType::F32),
        _ => values,
    };
    Tensor::from_dispatch(launch_one(Encode(format), vec![values.into_dispatch()]))
}

/// The values of the first `count` codes, exactly, in `dtype` (f32, f16 or bf16; all values of the
/// formats are values of these types, but for those of E5M2 in no case).
pub fn decode(codes: Tensor<1, Int>, count: usize, format: Format, dtype: FloatDType) -> Tensor<1> {
    let kernel = Decode {
        format,
        count,
        dtype: dtype.into(),
    };
    Tensor::from_dispatch(launch_one(kernel, vec![codes.into_dispatch()]))
}

#[derive(Debug)]
struct Encode(Format);

#[derive(Debug)]
struct Decode {
    format: Format,
    count: usize,
    dtype: DType,
}

impl Kernel for Encode {
    fn name(&self) -> &'static str {
        "encode"
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let per_word = (32 / self.0.bits()) as usize;
        vec![Spec::new(
            [inputs[0].shape[0].div_ceil(per_word)],
            DType::U32,
        )]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::encode(self.0, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}

impl Kernel for Decode {
    fn name(&self) -> &'static str {
        "decode"
    }

    fn outputs(&self, _inputs: &[Spec]) -> Vec<Spec> {
        vec![Spec::new([self.count], self.dtype)]
    }

    fn cpu(&self, inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        vec![cpu::decode(self.format, self.count, self.dtype, &inputs[0])]
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, _inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        unimplemented!("the kernels come next")
    }
}
