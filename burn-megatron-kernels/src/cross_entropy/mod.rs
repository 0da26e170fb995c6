//! Cross entropy of logits against integer targets, without storing the softmax.
//!
//! With `x` a row of logits over a vocabulary of `K` tokens, `t` its target,
//! `lse = log sum over k of exp(x[k])`, the label smoothing `e`, `s = e K / (K - 1)` and the z-loss
//! `z`:
//!
//! ```text
//! loss    = lse - (1 - s) x[t] - s mean over k of x[k] + z lse^2
//! d x[k]  = g ((1 + 2 z lse) exp(x[k] - lse) - (1 - s) [k = t] - s / K)
//! ```
//!
//! so that the target keeps `1 - e` of the one-hot and the others share `e` (Szegedy et al. 2016,
//! "Rethinking the Inception Architecture"; z-loss: Chowdhery et al. 2022, "PaLM"). A vocabulary of
//! one token has nothing to smooth.
//!
//! [`cross_entropy`] is the whole loss. Its three parts serve a vocabulary that is split over
//! ranks: the [`statistics`] of each [`VocabularyShard`] are gathered, [`combine`]d on every rank,
//! and [`gradient`] is local again. The logits are read once for the loss, and read and written
//! once for the gradient; [`loss_and_gradient`] reads them once for both. Maximum and sum are computed in one pass (Milakov and Gimelshein 2018,
//! "Online normalizer calculation for softmax").
//!
//! # Targets
//!
//! A target equal to [`CrossEntropyOptions::ignore`] gives a loss and a gradient of exactly 0,
//! whatever its logits are. Any other target outside of the vocabulary gives NaN for both, so that
//! invalid data is noticed. Padding columns have probability 0 and a gradient of exactly 0, and
//! their logits may be anything.
//!
//! # Values
//!
//! Everything is computed in f32, in f64 for f64. No finite logits overflow the exponential. The
//! gradient rests on `x[k] - lse`, so its relative error is about `|lse|` units in the last place.
//! A logit of negative infinity has the probability 0 (with smoothing its loss is infinite).
//! A NaN, a positive infinity, or a row of nothing but negative infinities give NaN for that row
//! alone.

use burn::backend::DispatchTensor;
use burn::tensor::{DType, Int, IntDType, Tensor};

use crate::apply;
use crate::cpu::wide;
use crate::error::{KernelError, accept};
use crate::launch::{exactly, launch, launch_one};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod ops;
#[cfg(test)]
mod tests;

use ops::LossPart;

/// The statistics of a row: maximum, sum of exponentials, target's logit, sum.
const STATISTICS: usize = 4;

/// Options of [`cross_entropy`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CrossEntropyOptions {
    /// The share `e` of the target's probability that goes to the other tokens, in `[0, 1)`.
    pub label_smoothing: f64,
    /// The weight `z` of the squared log-sum-exp; not negative.
    pub z_loss: f64,
    /// The target that has no loss and no gradient.
    pub ignore: Option<i64>,
}

/// The entries of the vocabulary that the columns of some logits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyShard {
    /// The entry that column 0 is.
    pub first: usize,
    /// The tokens of the whole vocabulary; entries from there on are padding.
    pub tokens: usize,
}

/// The loss of each row: `logits` `[rows, width]` and `targets` `[rows]` to `[rows]`, in f32 (f64
/// for f64).
///
/// Every column is a token. Under autodiff the logits are kept for the backward, which writes the
/// gradient into their memory if that is not shared.
///
/// # Panics
///
/// When the shapes do not agree, the logits have no column or more than 2^31 - 1, an option is out
/// of its range, or the device does not compute in the type of the logits.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_megatron_kernels::cross_entropy::{CrossEntropyOptions, cross_entropy};
///
/// let device = Device::flex();
/// let logits = Tensor::<2>::zeros([3, 4], &device);
/// let targets = Tensor::<1, Int>::from_ints([0, 3, -1], &device);
/// let options = CrossEntropyOptions { ignore: Some(-1), ..Default::default() };
/// let loss = cross_entropy(logits, targets, &options).sum().into_scalar::<f32>();
/// assert!((loss - 2.0 * 4f32.ln()).abs() < 1e-6);
/// ```
pub fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    options: &CrossEntropyOptions,
) -> Tensor<1> {
    let [_, tokens] = logits.dims();
    let part = VocabularyShard { first: 0, tokens };
    accept(check(&logits, &targets, &part, options));
    let function = backward::CrossEntropy {
        targets: Tensor::from_dispatch(kernel_targets(targets)),
        part,
        options: options.clone(),
    };
    apply(vec![logits.into_dispatch()], function)
}

/// The statistics of a shard for [`combine`]: `logits` `[rows, width]` and `targets` `[rows]` to
/// `[rows, 4]` in f32 (f64 for f64).
///
/// The four are, over the valid columns: the maximum, the sum of `exp(x - maximum)`, the logit of
/// the target (0 if this shard does not hold it) and the sum. A shard of padding only gives the
/// lowest finite value, 0, 0 and 0. Plain tensors only: not differentiable.
///
/// # Panics
///
/// As [`cross_entropy`], and when the vocabulary has no token or more than 2^31 - 1.
pub fn statistics(logits: Tensor<2>, targets: Tensor<1, Int>, part: &VocabularyShard) -> Tensor<2> {
    accept(check(&logits, &targets, part, &Default::default()));
    let op = LossPart::Statistics.op(part, logits.dims()[1], &Default::default());
    let inputs = vec![logits.into_dispatch(), kernel_targets(targets)];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// The loss `[rows]` and the log-sum-exp `[rows]` from the [`statistics`] of all parts
/// `[parts, rows, 4]`, the same wherever it is computed.
///
/// `tokens` is the number of tokens of the whole vocabulary. Plain tensors only.
///
/// # Panics
///
/// When the shapes do not agree, `parts` is neither f32 nor f64, or an option is out of its range.
pub fn combine(
    parts: Tensor<3>,
    targets: Tensor<1, Int>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<1>) {
    accept(check_combine(&parts, &targets, tokens, options));
    combined(parts.into_dispatch(), targets, tokens, options)
}

/// [`combine`] for statistics that have been checked; those of one part may be `[rows, 4]`.
fn combined(
    parts: DispatchTensor,
    targets: Tensor<1, Int>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<1>) {
    let op = LossPart::Combine.op(&VocabularyShard { first: 0, tokens }, tokens, options);
    let outputs = launch(op, vec![parts, kernel_targets(targets)]);
    exactly(outputs).map(Tensor::from_dispatch).into()
}

/// The gradient of a part's logits, `[rows, width]` in their type.
///
/// `lse` `[rows]` is that of [`combine`], `gradient` `[rows]` belongs to the loss; both are f32
/// (f64 for f64). It is written into the memory of `logits` if that is not shared. Plain tensors
/// only.
///
/// # Panics
///
/// As [`statistics`], and when `lse` or `gradient` have another length or type.
pub fn gradient(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    lse: Tensor<1>,
    gradient: Tensor<1>,
    part: &VocabularyShard,
    options: &CrossEntropyOptions,
) -> Tensor<2> {
    accept(check(&logits, &targets, part, options));
    accept(check_gradient(&logits, &lse, &gradient));
    let op = LossPart::Gradient.op(part, logits.dims()[1], options);
    let inputs = vec![
        logits.into_dispatch(),
        kernel_targets(targets),
        lse.into_dispatch(),
        gradient.into_dispatch(),
    ];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// The loss `[rows]` and the gradient of the logits from `upstream`, the gradient `[rows]` of the loss, which is known
/// already. The columns are the whole vocabulary of `tokens` tokens, and padding.
///
/// On CubeCL devices this is one launch that reads each row from memory once and writes it once, if rows are of whole
/// vectors of 128 bits; the three parts otherwise. The values are those of the three parts, on GPUs up to rounding.
/// Written into the memory of `logits` if that is not shared. Plain tensors only.
///
/// # Panics
///
/// As [`gradient`], and when there are fewer columns than tokens.
pub fn loss_and_gradient(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    upstream: Tensor<1>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<2>) {
    let part = VocabularyShard { first: 0, tokens };
    accept(check(&logits, &targets, &part, options));
    accept(check_gradient(&logits, &upstream, &upstream));
    accept(check_whole(&logits, tokens));
    let op = LossPart::LossAndGradient.op(&part, logits.dims()[1], options);
    let inputs = vec![
        logits.into_dispatch(),
        kernel_targets(targets),
        upstream.into_dispatch(),
    ];
    let [loss, gradient] = exactly(launch(op, inputs));
    (Tensor::from_dispatch(loss), Tensor::from_dispatch(gradient))
}

/// Targets without autodiff, in a type that the kernels support.
fn kernel_targets(targets: Tensor<1, Int>) -> DispatchTensor {
    let targets = if targets.is_autodiff() {
        targets.inner()
    } else {
        targets
    };
    widened(targets).into_dispatch()
}

/// Targets in a type that holds every token: 32 or 64 bits.
fn widened(targets: Tensor<1, Int>) -> Tensor<1, Int> {
    match targets.dtype() {
        DType::I8 | DType::I16 | DType::U8 | DType::U16 => targets.cast(IntDType::I32),
        _ => targets,
    }
}

/// The ignored target, where the type of the targets has such a value.
fn ignored(ignore: Option<i64>, dtype: DType) -> Option<i64> {
    ignore.filter(|value| match dtype {
        DType::I32 => i32::try_from(*value).is_ok(),
        DType::U32 => u32::try_from(*value).is_ok(),
        DType::U64 => u64::try_from(*value).is_ok(),
        _ => true,
    })
}

const NAME: &str = "cross_entropy";

fn check(
    logits: &Tensor<2>,
    targets: &Tensor<1, Int>,
    part: &VocabularyShard,
    options: &CrossEntropyOptions,
) -> Result<(), KernelError> {
    let ([rows, width], [given]) = (logits.dims(), targets.dims());
    if given != rows {
        let message = format!(
            "logits [{rows}, {width}] have {rows} rows, targets [{given}] are {given}: expected \
             one target for each row"
        );
        return Err(KernelError::shape(NAME, message));
    }
    if width == 0 || width > i32::MAX as usize {
        let most = i32::MAX;
        let message =
            format!("logits [{rows}, {width}] have {width} columns: expected 1 to {most}");
        return Err(KernelError::shape(NAME, message));
    }
    check_options(part.tokens, options)
}

fn check_options(tokens: usize, options: &CrossEntropyOptions) -> Result<(), KernelError> {
    let wrong = |name, value: &dyn ToString, fits| {
        Err(KernelError::option(NAME, name, value.to_string(), fits))
    };
    if tokens == 0 || tokens > i32::MAX as usize {
        return wrong("tokens", &tokens, "1 to 2147483647");
    }
    if !(0.0..1.0).contains(&options.label_smoothing) {
        let fits = "0 up to, but not including, 1";
        return wrong("label_smoothing", &options.label_smoothing, fits);
    }
    if !options.z_loss.is_finite() || options.z_loss < 0.0 {
        return wrong("z_loss", &options.z_loss, "0 or more");
    }
    Ok(())
}

fn check_combine(
    parts: &Tensor<3>,
    targets: &Tensor<1, Int>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> Result<(), KernelError> {
    let ([count, rows, statistics], [given]) = (parts.dims(), targets.dims());
    if count == 0 || statistics != STATISTICS || given != rows {
        let message = format!(
            "statistics [{count}, {rows}, {statistics}] beside targets [{given}]: expected \
             [parts, {given}, {STATISTICS}] with 1 part or more"
        );
        return Err(KernelError::shape(NAME, message));
    }
    check_type(&parts.device(), parts.dtype(), wide(parts.dtype()))?;
    check_options(tokens, options)
}

fn check_gradient(
    logits: &Tensor<2>,
    lse: &Tensor<1>,
    gradient: &Tensor<1>,
) -> Result<(), KernelError> {
    let ([rows, width], [sums], [given]) = (logits.dims(), lse.dims(), gradient.dims());
    if sums != rows || given != rows {
        let message = format!(
            "logits [{rows}, {width}] beside a log-sum-exp [{sums}] and a gradient [{given}]: expected [{rows}] for both"
        );
        return Err(KernelError::shape(NAME, message));
    }
    let fits = wide(logits.dtype());
    check_type(&lse.device(), lse.dtype(), fits)?;
    check_type(&gradient.device(), gradient.dtype(), fits)
}

fn check_whole(logits: &Tensor<2>, tokens: usize) -> Result<(), KernelError> {
    let [rows, width] = logits.dims();
    if tokens <= width {
        return Ok(());
    }
    let message = format!(
        "logits [{rows}, {width}] for {tokens} tokens: expected {tokens} columns or more, the whole vocabulary"
    );
    Err(KernelError::shape(NAME, message))
}

/// Statistics have one type for each type of logits.
fn check_type(device: &burn::tensor::Device, dtype: DType, fits: DType) -> Result<(), KernelError> {
    if dtype == fits {
        Ok(())
    } else {
        Err(KernelError::Type {
            operation: NAME,
            dtype,
            device: format!("{device:?}"),
            fits: format!("statistics in {fits:?}"),
        })
    }
}
