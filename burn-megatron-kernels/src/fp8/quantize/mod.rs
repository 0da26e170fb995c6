//! Quantizers, which convert float tensors to FP8 codes and scales. They also return the largest magnitude of the
//! tensor.
//!
//! The formulas follow Transformer Engine. The MX formulas follow the OCP Microscaling Formats (MX) Specification 1.0,
//! with scales that are rounded up.

use burn::tensor::{DType, Tensor};

use super::check;
use super::format::Format;
use super::matrix::Fp8Matrix;
use crate::error::accept;
use crate::launch::{SimpleOp, Spec, launch, launch_one};

mod cpu;
mod input;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod ops;
pub(super) mod scaling;
#[cfg(test)]
pub(crate) mod tests;

pub use input::QuantizerInput;
use ops::QuantizeOp;
use scaling::ScalingKind;
pub use scaling::{CurrentScale, QuantizerUsage, Scaling};

const NAME: &str = "quantize";

/// The result of [`quantize`].
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The rowwise copy for multiplications that sum over the columns. `None` if it was not requested.
    pub rowwise: Option<Fp8Matrix>,
    /// The transposed (columnwise) copy for multiplications that sum over the rows. `None` if it was not requested.
    pub columnwise: Option<Fp8Matrix>,
    /// Statistics of the values, `[2]` in f32: the largest magnitude (NaN if a value is NaN), and the number of
    /// saturated values.
    ///
    /// A value is saturated if its magnitude after scaling exceeds the largest value of the format. If both copies are
    /// computed, saturation is counted in the rowwise copy. Infinities count as saturated, NaN does not.
    pub seen: Tensor<1>,
}

/// Quantizes the matrix `x`, `[rows, columns]` in f32, f16 or bf16, in one pass.
///
/// See [`Fp8Matrix`] for the layout of the copies. `x` may also be an activation that is computed in the same pass. See
/// [`QuantizerInput::activated`].
///
/// A value `v` is multiplied by a factor `s`, and `v s` is converted to a code by [`Format::encode`]. The scale that is
/// stored in the copy is `1 / s`, rounded to f32. The factor depends on the scaling method. In the formulas, `max` is
/// [`Format::max`], and `amax` is the largest magnitude of a block:
///
/// ```text
/// Tensor   s is given
/// Blocks   s = max / amax, at most the largest f32, for 1 x 128 or 128 x 128 elements;
///          power_of_two clears its mantissa; 1 where amax is 0, infinite or NaN
/// Mx       1 / s = amax / 448, rounded up to a power of two, for 1 x 32 elements, in E8M0:
///          2^-127 for 0, 2^127 for infinity, NaN for NaN
/// ```
///
/// The last block may be smaller than the other blocks, so all sizes are valid, including 0. Infinities are converted
/// to the code of the largest finite value. NaN is converted to the code of NaN. With MX, all values of a block that
/// contains NaN are converted to the code of NaN. With 1 x 128 blocks and with MX, the two copies have different blocks
/// and scales. The columnwise copy is therefore not the transpose of the rowwise copy.
///
/// Use MX with [`Format::E4M3`]. With E5M2, no value saturates, but the upper part of the range of E5M2 is not used.
///
/// On CubeCL devices, the function launches two kernels. Values that are not contiguous are copied first. The first
/// kernel reads `x` once. It loads 128 bits at a time if `columns` is a multiple of the number of elements in 128 bits.
/// The second kernel is small.
///
/// All devices compute bitwise the same results as the CPU. For scales that are not powers of two, this requires IEEE
/// 754 division. CUDA has IEEE 754 division. WebGPU allows errors of 2.5 units in the last place. Subnormal f16 numbers
/// are read as 0 on devices that flush subnormal f16 numbers. Subnormal f32 numbers are kept on all devices. An f64
/// matrix is rounded to f32 first.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if
/// - the format is [`Format::E2M1`],
/// - a scale that is given with [`Scaling::Tensor`] is not `[1]` in f32,
/// - the matrix has an unsupported type,
/// - there are more elements than [`MAX_ELEMENTS`](crate::MAX_ELEMENTS),
/// - the input tensors are on different devices.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::fp8::{Format, Scaling, QuantizerUsage, dequantize, quantize};
///
/// let x = Tensor::<2>::from_floats([[0.3, -8.0, 70.0], [0.0, 1.1, 448.0]], &Device::flex());
/// let quantized = quantize(x, Format::E4M3, &Scaling::Mx, QuantizerUsage::BOTH);
/// let values = |matrix| {
///     let data = dequantize(&matrix).into_data();
///     data.try_into_vec::<f32>().unwrap()
/// };
/// // The scales of the rows are 2^-2 and 1.
/// let rowwise = values(quantized.rowwise.unwrap());
/// assert_eq!(rowwise, [0.3125, -8.0, 72.0, 0.0, 1.125, 448.0]);
/// // The scales of the columns are 2^-10, 2^-5 and 1.
/// let columnwise = values(quantized.columnwise.unwrap());
/// assert_eq!(columnwise, [0.3125, 0.0, -8.0, 1.125, 72.0, 448.0]);
/// ```
pub fn quantize(
    x: impl Into<QuantizerInput>,
    format: Format,
    scaling: &Scaling,
    usage: QuantizerUsage,
) -> Quantized {
    run(x.into(), format, scaling, usage, None)
}

/// Computes [`quantize`] and adds the statistics of `x` to entry `slot` of a [log](super::empty_log). The field
/// [`Quantized::seen`] of the result holds the updated log. It is updated in place if no other tensor shares its
/// memory.
///
/// # Panics
///
/// Panics in the same cases as [`quantize`], and with a [`KernelError`](crate::KernelError) if the log has no entry
/// `slot`.
pub fn quantize_logged(
    x: impl Into<QuantizerInput>,
    format: Format,
    scaling: &Scaling,
    usage: QuantizerUsage,
    log: Tensor<1>,
    slot: usize,
) -> Quantized {
    accept(check::entry(NAME, &log, slot));
    run(x.into(), format, scaling, usage, Some((log, slot)))
}

fn run(
    x: QuantizerInput,
    format: Format,
    scaling: &Scaling,
    usage: QuantizerUsage,
    log: Option<(Tensor<1>, usize)>,
) -> Quantized {
    accept(check::format(NAME, format));
    let kind = ScalingKind::of(scaling);
    let [rows, columns] = x.dims();
    let (activation, mut inputs) = x.into_inputs();
    let given = match scaling {
        Scaling::Tensor(scale) => {
            accept(check::one(NAME, "scale", scale));
            Some((scale, 0))
        }
        Scaling::Element { scales, index } => {
            accept(check::element(NAME, scales, *index));
            Some((scales, *index))
        }
        _ => None,
    };
    inputs.extend(given.map(|(scales, _)| scales.clone().into_dispatch()));
    let op = QuantizeOp {
        format,
        kind,
        usage,
        activation,
        given: given.map_or(0, |(_, index)| index),
        slot: log.as_ref().map(|(_, slot)| *slot),
    };
    inputs.extend(log.map(|(log, _)| log.into_dispatch()));
    let mut outputs = launch(op, inputs).into_iter();
    let mut next = || match outputs.next() {
        Some(output) => output,
        None => unreachable!("a quantiser returns the declared outputs"),
    };
    let mut copy = |made: bool, depth: usize| {
        made.then(|| Fp8Matrix {
            codes: Tensor::from_dispatch(next()),
            scales: kind.scales(next()),
            format,
            depth,
        })
    };
    let (rowwise, columnwise) = (copy(usage.rowwise, columns), copy(usage.columnwise, rows));
    Quantized {
        rowwise,
        columnwise,
        seen: Tensor::from_dispatch(next()),
    }
}

/// Returns the largest magnitude (amax) of a tensor in f32, f16 or bf16. The result is `[1]` in f32. It is NaN if a
/// value is NaN, and 0 for an empty tensor. On CubeCL devices, the function launches two kernels. The result does not
/// depend on the device.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the tensor has an unsupported type or too many elements.
pub fn amax(x: Tensor<2>) -> Tensor<1> {
    let (_, inputs) = QuantizerInput::from(x).into_inputs();
    let op = SimpleOp {
        name: "amax",
        parameters: (),
        outputs: vec![Spec::new([1], DType::F32)],
        cpu: |_, inputs| vec![cpu::amax(&inputs[0])],
        #[cfg(feature = "cubecl")]
        cube: |_, mut inputs| vec![kernel::amax(inputs.remove(0))],
    };
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// Returns the scale for a tensor whose largest magnitude is `amax`. `amax` and the scale are `[1]` in f32. The scale
/// multiplies the values before they are encoded. It is `max / amax`, where `max` is [`Format::max`].
///
/// If `amax` is smaller than [`CurrentScale::epsilon`], epsilon is used instead. If `amax` is then 0, infinite or NaN,
/// the scale is 1. If the quotient `max / amax` is infinite, the scale is the largest finite f32. With
/// [`CurrentScale::power_of_two`], the scale is rounded down to a power of two. On CubeCL devices, the function
/// launches one kernel. See [`quantize`] for the accuracy of the division.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if `amax` is not `[1]` in f32, if the format is [`Format::E2M1`],
/// or if epsilon is negative, infinite or NaN.
pub fn current_scale(amax: Tensor<1>, format: Format, options: CurrentScale) -> Tensor<1> {
    const NAME: &str = "current_scale";
    accept(check::format(NAME, format));
    accept(check::one(NAME, "largest magnitude", &amax));
    accept(check::epsilon(NAME, options.epsilon));
    let op = SimpleOp {
        name: NAME,
        parameters: (format, options),
        outputs: vec![Spec::new([1], DType::F32)],
        cpu: |&(format, options), inputs| vec![cpu::scale_of(&inputs[0], format, options)],
        #[cfg(feature = "cubecl")]
        cube: |&(format, options), mut inputs| {
            vec![kernel::scale_of(inputs.remove(0), format, options)]
        },
    };
    Tensor::from_dispatch(launch_one(op, vec![amax.into_dispatch()]))
}

/// Returns the values of a quantized matrix, `[rows, depth]` in f32. The value of an element is its decoded code times
/// its scale.
///
/// On CubeCL devices, the function launches one kernel, and results that are subnormal in f32 may become 0.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if the sizes of codes and scales do not match, if their types
/// differ from the types documented for [`Fp8Matrix`], or if the format is [`Format::E2M1`].
pub fn dequantize(matrix: &Fp8Matrix) -> Tensor<2> {
    const NAME: &str = "dequantize";
    accept(matrix.check(NAME, "the matrix"));
    let (kind, depth) = (ScalingKind::of_matrix(matrix), matrix.depth);
    let op = SimpleOp {
        name: NAME,
        parameters: (matrix.format, kind, depth),
        outputs: vec![Spec::new([matrix.rows(), depth], DType::F32)],
        cpu: |&(format, kind, depth), inputs| vec![cpu::dequantize(&inputs, format, kind, depth)],
        #[cfg(feature = "cubecl")]
        cube: |&(format, kind, depth), inputs| {
            vec![kernel::dequantize(inputs, format, kind, depth)]
        },
    };
    Tensor::from_dispatch(launch_one(op, matrix.tensors().to_vec()))
}
