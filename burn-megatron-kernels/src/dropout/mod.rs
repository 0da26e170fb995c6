//! Bias, dropout and residual addition in one operation. The dropout mask is computed from Philox counters.
//!
//! The output is `y = residual + mask * (x + bias)`. The mask is `1 / (1 - p)` for elements that are kept and 0 for
//! dropped elements. The mask is not stored. The backward pass recomputes it.

use burn::tensor::{DType, Tensor};

use crate::KernelError;
use crate::error::{accept, check_size};
use crate::gradient::Parameter;

mod backward;
pub mod composed;
mod cpu;
mod cpu_mask;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

use backward::BiasDropoutAdd;

const NAME: &str = "bias_dropout_add";

/// Parameters of the random numbers that determine a dropout mask.
///
/// Let `e` be the flat, row-major index of an element in the local tensor of a rank. The element uses the random number
/// with index `first + (e / run) * pitch + e % run` of [`Stream::new(key, position)`](crate::philox::Stream::new). The
/// element is kept if this random number is less than `(1 - probability) * 2^32`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// The probability that an element is dropped, in `[0, 1)`.
    pub probability: f64,
    /// The key of the random stream.
    pub key: u64,
    /// The position of the random stream, such as a training step.
    pub position: u64,
    /// The index of the random number for element 0.
    pub first: u64,
    /// The number of consecutive elements (a run) that use consecutive random numbers. It must be at least 1.
    pub run: usize,
    /// The distance between the first random numbers of consecutive runs.
    pub pitch: u64,
}

/// Computes `residual + dropout(x + bias)` in one operation.
///
/// - `x`: `[.., width]`.
/// - `bias`: `[width]`, of any float type.
/// - `residual`: the shape of `x`, in the type of `x`. If `x` is f16 or bf16, the residual may be f32.
///
/// Without a `draw`, nothing is dropped. The function computes in f32 (f64 for f64). The result is rounded once, to the
/// type of the residual, or to the type of `x` if there is no residual. A dropped value is multiplied by 0. If the
/// value is infinite or NaN, the result is therefore NaN.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - shapes do not match, or the residual has an unsupported type,
/// - the probability is not in `[0, 1)`, [`Draw::run`] is 0, or the index of a random number exceeds 2^64,
/// - the device does not support the element type.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::dropout::{Draw, bias_dropout_add};
///
/// let draw = Draw {
///     probability: 0.5,
///     key: 7,
///     position: 0,
///     first: 0,
///     run: 1024,
///     pitch: 1024,
/// };
/// let x = Tensor::<2>::ones([4, 256], &Device::flex());
/// let y = bias_dropout_add(x.clone(), None, Some(x), Some(draw));
/// let kept = y.equal_elem(3.0).int().sum().into_scalar::<i64>();
/// assert!((450..574).contains(&kept));
/// ```
pub fn bias_dropout_add<const D: usize>(
    x: Tensor<D>,
    bias: Option<Tensor<1>>,
    residual: Option<Tensor<D>>,
    draw: Option<Draw>,
) -> Tensor<D> {
    bias_dropout_add_with(x, bias.map(Parameter::from), residual, draw)
}

/// Computes [`bias_dropout_add`] with a bias whose gradient can be written to a flat buffer.
pub fn bias_dropout_add_with<const D: usize>(
    x: Tensor<D>,
    bias: Option<Parameter>,
    residual: Option<Tensor<D>>,
    draw: Option<Draw>,
) -> Tensor<D> {
    let (bias, destination) = Parameter::into_parts(bias);
    let mask = accept(check(&x, bias.as_ref(), residual.as_ref(), draw));
    let dims = x.dims();
    if dims.contains(&0) || bias.is_none() && residual.is_none() && mask.is_none() {
        return residual.unwrap_or(x);
    }
    let function = BiasDropoutAdd {
        sizes: RowSizes {
            elements: dims.iter().product(),
            width: dims[D - 1],
        },
        mask,
        input: x.dtype(),
        bias: bias.as_ref().map(Tensor::dtype),
        residual: residual.as_ref().map(Tensor::dtype),
        destination,
    };
    let mut inputs = vec![x.into_dispatch()];
    inputs.extend(bias.map(Tensor::into_dispatch));
    inputs.extend(residual.map(Tensor::into_dispatch));
    crate::apply(inputs, function)
}

/// The number of elements of the tensor and the width of its rows.
#[derive(Clone, Copy, Debug)]
struct RowSizes {
    elements: usize,
    width: usize,
}

/// Returns the lower and the upper half of a number.
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// The checked parameters of a dropout mask.
#[derive(Clone, Copy, Debug)]
struct DropoutMask {
    key: [u32; 2],
    position: [u32; 2],
    first: u64,
    run: usize,
    pitch: u64,
    /// A random word is kept if it is below this threshold.
    threshold: u32,
    /// The factor that multiplies kept values.
    scale: f32,
}

impl DropoutMask {
    /// Creates the mask of `elements` elements, or returns `None` if all of them are kept.
    fn new(draw: Draw, elements: usize) -> Option<Self> {
        let keep = 1.0 - draw.probability;
        let threshold = u32::try_from((keep * 4_294_967_296.0) as u64).ok()?;
        // If the runs are consecutive, they form a single run.
        let (run, pitch) = if draw.run >= elements || draw.pitch == draw.run as u64 {
            (elements, 0)
        } else {
            (draw.run, draw.pitch)
        };
        Some(Self {
            key: halves(draw.key),
            position: halves(draw.position),
            first: draw.first,
            run,
            pitch,
            threshold,
            scale: (1.0 / keep) as f32,
        })
    }

    /// Returns the index of the random number of an element.
    #[inline(always)]
    fn draw(&self, element: usize) -> u64 {
        let (run, offset) = (element / self.run, element % self.run);
        self.first + run as u64 * self.pitch + offset as u64
    }

    /// Returns whether any four elements, starting at a multiple of four, use the four words of one Philox block.
    #[cfg(feature = "cubecl")]
    fn is_aligned(&self) -> bool {
        let runs = self.pitch == 0 || self.run.is_multiple_of(4) && self.pitch.is_multiple_of(4);
        runs && self.first.is_multiple_of(4)
    }
}

fn check<const D: usize>(
    x: &Tensor<D>,
    bias: Option<&Tensor<1>>,
    residual: Option<&Tensor<D>>,
    draw: Option<Draw>,
) -> Result<Option<DropoutMask>, KernelError> {
    let dims = x.dims();
    check_size(NAME, &dims)?;
    let width = dims[D - 1];
    if let Some(bias) = bias.map(Tensor::dims)
        && bias != [width]
    {
        let message = format!("a bias {bias:?} does not fit x {dims:?}: expected [{width}]");
        return Err(KernelError::shape(NAME, message));
    }
    if let Some(residual) = residual {
        let given = residual.dims();
        if given != dims {
            let message =
                format!("a residual {given:?} does not fit x {dims:?}: expected the same shape");
            return Err(KernelError::shape(NAME, message));
        }
        check_type(x.dtype(), residual.dtype())?;
    }
    match draw {
        None => Ok(None),
        Some(draw) => {
            let elements = dims.iter().product();
            check_draw(&draw, elements)?;
            Ok(DropoutMask::new(draw, elements))
        }
    }
}

fn check_type(input: DType, residual: DType) -> Result<(), KernelError> {
    let short = matches!(input, DType::F16 | DType::BF16);
    if residual == input || short && residual == DType::F32 {
        return Ok(());
    }
    Err(KernelError::Type {
        operation: NAME,
        dtype: residual,
        device: format!("a residual for x in {input:?}"),
        fits: if short {
            format!("{input:?}, F32")
        } else {
            format!("{input:?}")
        },
    })
}

fn check_draw(draw: &Draw, elements: usize) -> Result<(), KernelError> {
    let refuse = |name, value: &dyn ToString, fits| {
        Err(KernelError::option(NAME, name, value.to_string(), fits))
    };
    if !(0.0..1.0).contains(&draw.probability) {
        let fits = "at least 0 and below 1";
        return refuse("probability", &draw.probability, fits);
    }
    if draw.run == 0 {
        return refuse("run", &0, "at least 1");
    }
    let runs = (elements.max(1) - 1) / draw.run;
    let longest = draw.run.min(elements) as u64;
    let end = (runs as u64)
        .checked_mul(draw.pitch)
        .and_then(|start| start.checked_add(draw.first))
        .and_then(|start| start.checked_add(longest));
    match end {
        Some(_) => Ok(()),
        None => {
            let value = format!("{} with a pitch of {}", draw.first, draw.pitch);
            refuse("first", &value, "one whose last draw is below 2^64")
        }
    }
}
