//! Encodes tensors as packed FP8 or FP4 codes, and decodes these codes.

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

/// Encodes `values`, `[count]`, as packed codes, `[ceil(count / n)]` in u32.
///
/// A u32 word holds `n` codes: 4 for 8-bit formats and 8 for E2M1. The first code is in the lowest bits. The unused
/// bits of the last word are 0.
///
/// Each value is rounded to the nearest value of the format. Ties are rounded to the even code. See [`Format::encode`]
/// for saturation and NaN. `values` may be f32, f16, bf16 or, on the CPU, f64. f64 values are rounded to f32 first.
/// `count` may be 0. On devices that flush subnormal f16 numbers, f16 values below 2^-14 become 0. This affects only
/// the E5M2 format.
///
/// On CubeCL devices, the function launches one kernel. Values that are not contiguous are copied first. The kernel
/// moves 128 bits at a time if `count` is a multiple of the number of values in 128 bits.
///
/// # Panics
///
/// Panics with a [`KernelError`] if `values` has a type that is not listed above, or if the device does not support the
/// type.
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

/// Decodes the first `count` of the packed `codes`, which have the layout of [`encode`]. The result is `[count]` in
/// `dtype`.
///
/// The result is exact, because f32, f64, f16 and bf16 can represent all values of every [`Format`], including
/// infinities and NaN. Only E5M2 has values that are subnormal in f16. They become 0 on devices that flush subnormal
/// f16 numbers.
///
/// # Panics
///
/// Panics with a [`KernelError`] if there are fewer than `count` codes, if the codes are not u32, or if the device does
/// not support `dtype`.
pub fn decode(codes: Tensor<1, Int>, count: usize, format: Format, dtype: FloatDType) -> Tensor<1> {
    decode_as(codes, count, dtype, Coding::Value(format))
}

/// Encodes `values`, `[count]`, as powers of two in E8M0, packed into `[ceil(count / 4)]` in u32. The first code is in
/// the lowest bits. The unused bits of the last word are 0.
///
/// See [`e8m0::encode`] for values outside the range of the format, negative values and NaN. `values` may have the same
/// types as the values of [`encode`].
///
/// # Panics
///
/// Panics in the same cases as [`encode`].
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

/// Decodes the first `count` of the packed E8M0 `codes`, which have the layout of [`encode_scales`]. The result is
/// `[count]` in f32 and is exact. The smallest value, 2^-127, is a subnormal f32 number.
///
/// # Panics
///
/// Panics with a [`KernelError`] if there are fewer than `count` codes, or if the codes are not
/// u32.
pub fn decode_scales(codes: Tensor<1, Int>, count: usize) -> Tensor<1> {
    // Decoding does not round.
    decode_as(
        codes,
        count,
        FloatDType::F32,
        Coding::Scale(Rounding::Nearest),
    )
}

/// The kind of values that the codes represent.
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
