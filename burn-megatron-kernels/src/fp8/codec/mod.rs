//! Packed codes of many values.

use burn::tensor::{DType, FloatDType, Int, Tensor};

use super::format::{Format, Rounding, e8m0};
use crate::KernelError;
use crate::error::{accept, check_shape};
use crate::launch::{SimpleOp, Spec, launch_one};

mod cpu;
#[cfg(feature = "cubecl")]
mod kernel;
#[cfg(test)]
mod tests;

#[cfg(feature = "cubecl")]
pub(crate) use kernel::aot_instances;

/// The codes of `values`, packed: `[count]` to `[ceil(count / n)]` of u32, the first code in the
/// lowest bits; `n` is 4 for formats of 8 bits and 8 for E2M1. The rest of the last word is 0.
///
/// Each value is rounded to the nearest one of the format, ties to the even code; see
/// [`Format::encode`] for saturation and NaN. `values` may be f32, f16, bf16 or, on the CPU, f64,
/// which is rounded to f32 first. A count of 0 is valid. Values of f16 below 2^-14 are 0 on devices
/// that flush subnormal numbers of that type, which matters for E5M2 only.
///
/// On CubeCL devices this is one launch, plus a copy if the values are not contiguous. It moves 128
/// bits at a time if `count` is a multiple of as many values.
///
/// # Panics
///
/// With a [`KernelError`] for values of another type, or of one that the device does not support.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, FloatDType, Tensor};
/// use burn_megatron_kernels::fp8::{Format, decode, encode};
///
/// let values = Tensor::<1>::from_floats([0.3, -1000.0, 17.0], &Device::flex());
/// let codes = encode(values, Format::E4M3);
/// assert_eq!(codes.dims(), [1]);
/// let values = decode(codes, 3, Format::E4M3, FloatDType::F32);
/// let values: Vec<f32> = values.into_data().try_into_vec().unwrap();
/// assert_eq!(values, [0.3125, -448.0, 16.0]);
/// ```
pub fn encode(values: Tensor<1>, format: Format) -> Tensor<1, Int> {
    encode_as(values, Coding::Value(format))
}

/// The values of the first `count` of `codes`, packed as [`encode`] does it: `[count]` in `dtype`.
///
/// This is exact: f32, f64, f16 and bf16 hold all values of the formats, the infinities and NaN of
/// E5M2 and the NaN of E4M3 included. Subnormal numbers of f16, which only E5M2 has, are 0 on devices
/// that flush them.
///
/// # Panics
///
/// With a [`KernelError`] for more values than there are codes, for codes that are not u32, and for
/// a type that the device does not support.
pub fn decode(codes: Tensor<1, Int>, count: usize, format: Format, dtype: FloatDType) -> Tensor<1> {
    decode_as(codes, count, dtype, Coding::Value(format))
}

/// The codes of `values` as powers of two, E8M0, packed: `[count]` to `[ceil(count / 4)]` of u32,
/// the first code in the lowest bits. The rest of the last word is 0.
///
/// See [`e8m0::encode`] for what becomes of values below and beyond all powers, negative ones and
/// NaN. The types are those of [`encode`].
///
/// # Panics
///
/// See [`encode`].
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::fp8::{Rounding, decode_scales, encode_scales};
///
/// let scales = Tensor::<1>::from_floats([0.25, 1.1, 3.0], &Device::flex());
/// let codes = encode_scales(scales, Rounding::Up);
/// let powers: Vec<f32> = decode_scales(codes, 3).into_data().try_into_vec().unwrap();
/// assert_eq!(powers, [0.25, 2.0, 4.0]);
/// ```
pub fn encode_scales(values: Tensor<1>, rounding: Rounding) -> Tensor<1, Int> {
    encode_as(values, Coding::Scale(rounding))
}

/// The values of the first `count` of `codes` of E8M0, packed as [`encode_scales`] does it: `[count]`
/// in f32, exactly. The smallest, 2^-127, is subnormal in f32.
///
/// # Panics
///
/// With a [`KernelError`] for more values than there are codes, and for codes that are not u32.
pub fn decode_scales(codes: Tensor<1, Int>, count: usize) -> Tensor<1> {
    // Decoding does not round.
    decode_as(
        codes,
        count,
        FloatDType::F32,
        Coding::Scale(Rounding::Nearest),
    )
}

/// The kind of values that codes encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Coding {
    Value(Format),
    Scale(Rounding),
}

impl Coding {
    fn bits(self) -> u32 {
        match self {
            Self::Value(format) => format.bits(),
            Self::Scale(_) => 8,
        }
    }

    fn per_word(self) -> usize {
        (u32::BITS / self.bits()) as usize
    }

    #[inline(always)]
    fn encode(self, value: f32) -> u8 {
        match self {
            Self::Value(format) => format.encode(value),
            Self::Scale(rounding) => e8m0::encode(value, rounding),
        }
    }

    fn decode(self, code: u8) -> f32 {
        match self {
            Self::Value(format) => format.decode(code),
            Self::Scale(_) => e8m0::decode(code),
        }
    }
}

fn encode_as(values: Tensor<1>, coding: Coding) -> Tensor<1, Int> {
    let values = match values.dtype() {
        DType::F64 => values.cast(FloatDType::F32),
        _ => values,
    };
    let name = match coding {
        Coding::Value(_) => "fp8::encode",
        Coding::Scale(_) => "fp8::encode_scales",
    };
    let floats = [DType::F32, DType::Flex32, DType::F16, DType::BF16];
    let (dtype, device) = (values.dtype(), values.device());
    if !floats.contains(&dtype) {
        let error = KernelError::element_type(name, dtype, device, floats);
        accept(Err(error))
    }
    let words = values.dims()[0].div_ceil(coding.per_word());
    let op = SimpleOp {
        name,
        parameters: coding,
        outputs: vec![Spec::new([words], DType::U32)],
        cpu: |coding, inputs| vec![cpu::encode(*coding, &inputs[0])],
        #[cfg(feature = "cubecl")]
        cube: |coding, mut inputs| vec![kernel::encode(inputs.remove(0), *coding)],
    };
    Tensor::from_dispatch(launch_one(op, vec![values.into_dispatch()]))
}

fn decode_as(codes: Tensor<1, Int>, count: usize, dtype: FloatDType, coding: Coding) -> Tensor<1> {
    let name = match coding {
        Coding::Value(_) => "fp8::decode",
        Coding::Scale(_) => "fp8::decode_scales",
    };
    let (given, device) = (codes.dtype(), codes.device());
    if given != DType::U32 {
        let error = KernelError::element_type(name, given, device, [DType::U32]);
        accept(Err(error))
    }
    let (words, per_word) = (codes.dims()[0], coding.per_word());
    accept(check_shape(name, count.div_ceil(per_word) <= words, || {
        format!(
            "{count} values do not fit the {} codes of {words} words",
            words * per_word
        )
    }));
    let dtype = dtype.into();
    let op = SimpleOp {
        name,
        parameters: (coding, count, dtype),
        outputs: vec![Spec::new([count], dtype)],
        cpu: |&(coding, count, dtype), inputs| vec![cpu::decode(coding, count, dtype, &inputs[0])],
        #[cfg(feature = "cubecl")]
        cube: |&(coding, count, dtype), mut inputs| {
            vec![kernel::decode(inputs.remove(0), count, dtype, coding)]
        },
    };
    Tensor::from_dispatch(launch_one(op, vec![codes.into_dispatch()]))
}
