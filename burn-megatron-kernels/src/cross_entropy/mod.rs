//! Cross entropy of logits against integer targets, without storing the softmax.
//!
//! Let `x` be a row of logits over a vocabulary of `K` tokens, let `t` be the target of the row, and let `lse = log(sum
//! over k of exp(x[k]))`. With label smoothing `e`, `s = e K / (K - 1)` and z-loss `z`:
//!
//! ```text
//! loss    = lse - (1 - s) x[t] - s mean over k of x[k] + z lse^2
//! d x[k]  = g ((1 + 2 z lse) exp(x[k] - lse) - (1 - s) [k = t] - s / K)
//! ```
//!
//! The probability of the target token is smoothed to `1 - e`. The remaining probability `e` is distributed equally
//! over the other tokens (Szegedy et al. 2016, "Rethinking the Inception Architecture"). The z-loss is from Chowdhery
//! et al. 2022, "PaLM". For a vocabulary of one token, label smoothing has no effect.
//!
//! [`cross_entropy`] computes the loss of logits over the complete vocabulary. If the vocabulary is split over ranks,
//! call three functions:
//!
//! - [`statistics`] on the [`VocabularyShard`] of each rank, followed by an all-gather of the results,
//! - [`combine`] on every rank, which computes the loss,
//! - [`gradient`] on every rank, which computes the gradient of the local logits.
//!
//! The loss reads the logits once. The gradient reads the logits once and writes each element once.
//! [`loss_and_gradient`] computes both and reads the logits only once. The maximum and the sum of the exponentials are
//! computed in one pass (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
//!
//! # Targets
//!
//! A row whose target equals [`CrossEntropyOptions::ignore`] has a loss and a gradient of exactly 0 for any logits. Any
//! other target outside the vocabulary gives a loss and a gradient of NaN, so that invalid data is noticed. Padding
//! columns have probability 0 and a gradient of exactly 0 for any logits.
//!
//! # Values
//!
//! All values are computed in f32 (f64 for f64). Finite logits never overflow the exponential. The gradient depends on
//! the difference `x[k] - lse`, so its relative error is about `|lse|` units in the last place.
//!
//! A logit of negative infinity has probability 0. With label smoothing, the loss of its row is infinite. The loss and
//! the gradient of a row are NaN if a logit is NaN or positive infinity, or if all logits are negative infinity. Other
//! rows are not affected.

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

/// The number of statistics per row: the maximum, the sum of exponentials, the logit of the target, and the sum of the
/// logits.
const STATISTICS: usize = 4;

/// Options of [`cross_entropy`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CrossEntropyOptions {
    /// The label smoothing `e` in `[0, 1)`: the total probability of all tokens other than the target.
    pub label_smoothing: f64,
    /// The weight `z` of the squared log-sum-exp (the z-loss). It must be at least 0.
    pub z_loss: f64,
    /// The target value of ignored rows, such as -100. Ignored rows have a loss and a gradient of 0.
    pub ignore: Option<i64>,
}

/// The vocabulary shard of a rank: the tokens that correspond to the columns of its logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VocabularyShard {
    /// The token index of column 0 in the complete vocabulary.
    pub first: usize,
    /// The number of tokens of the complete vocabulary. Columns whose token index is at least this number are padding.
    pub tokens: usize,
}

/// Returns the cross entropy loss of each row, `[rows]` in f32 (f64 for f64).
///
/// - `logits`: `[rows, width]`. Every column is a token.
/// - `targets`: `[rows]`, the target token of each row.
///
/// With autodiff, the logits are saved for the backward pass. The backward pass writes the gradient into the memory of
/// the logits if no other tensor shares it.
///
/// # Panics
///
/// Panics if
/// - the shapes do not match,
/// - the logits have no column or more than 2^31 - 1 columns,
/// - an option is out of range,
/// - the device does not support the type of the logits.
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

/// Computes the statistics of a vocabulary shard for [`combine`], `[rows, 4]` in f32 (f64 for f64).
///
/// - `logits`: `[rows, width]`.
/// - `targets`: `[rows]`.
///
/// The statistics of a row are the maximum `m` of its logits, the sum of `exp(x - m)` over the logits `x`, the logit of
/// the target, and the sum of the logits. Padding columns are excluded. If the target is not in this shard, its logit
/// is 0. If all columns are padding, the statistics are the lowest finite value, 0, 0 and 0. The function takes plain
/// tensors and is not differentiable.
///
/// # Panics
///
/// Panics in the same cases as [`cross_entropy`], and if the vocabulary has no token or more than 2^31 - 1 tokens.
pub fn statistics(logits: Tensor<2>, targets: Tensor<1, Int>, part: &VocabularyShard) -> Tensor<2> {
    accept(check(&logits, &targets, part, &Default::default()));
    let op = LossPart::Statistics.op(part, logits.dims()[1], &Default::default());
    let inputs = vec![logits.into_dispatch(), kernel_targets(targets)];
    Tensor::from_dispatch(launch_one(op, inputs))
}

/// Computes the loss `[rows]` and the log-sum-exp `[rows]` from the [`statistics`] of all vocabulary shards,
/// `[parts, rows, 4]`. Every rank computes the same result.
///
/// `tokens` is the number of tokens of the complete vocabulary. The function takes plain tensors and is not
/// differentiable.
///
/// # Panics
///
/// Panics if the shapes do not match, if `parts` is neither f32 nor f64, or if an option is out of range.
pub fn combine(
    parts: Tensor<3>,
    targets: Tensor<1, Int>,
    tokens: usize,
    options: &CrossEntropyOptions,
) -> (Tensor<1>, Tensor<1>) {
    accept(check_combine(&parts, &targets, tokens, options));
    combined(parts.into_dispatch(), targets, tokens, options)
}

/// Computes [`combine`] for statistics that have been checked. The statistics of a single shard may be `[rows, 4]`.
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

/// Computes the gradient of the logits of a vocabulary shard, `[rows, width]` in the type of the logits.
///
/// `lse` `[rows]` is the result of [`combine`], and `gradient` `[rows]` is the gradient of the loss. Both are f32 (f64
/// for f64). The result is written into the memory of `logits` if no other tensor shares it. The function takes plain
/// tensors and is not differentiable.
///
/// # Panics
///
/// Panics in the same cases as [`statistics`], and if the length or type of `lse` or `gradient` is wrong.
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

/// Computes the loss `[rows]` and the gradient of the logits in one call. `upstream` `[rows]` is the gradient of the
/// loss. The columns of `logits` are the complete vocabulary of `tokens` tokens, followed by optional padding columns.
///
/// If the size of a row is a multiple of 128 bits, CubeCL devices run a single kernel, which reads each row from memory
/// once and writes it once. Otherwise the function calls [`statistics`], [`combine`] and [`gradient`]. The single
/// kernel and the three functions compute the same values. On GPUs, the values may differ by rounding. The result is
/// written into the memory of `logits` if no other tensor shares it. The function takes plain tensors and is not
/// differentiable.
///
/// # Panics
///
/// Panics in the same cases as [`gradient`], and if there are fewer columns than tokens.
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

/// Returns the targets without autodiff, in an integer type that the kernels support.
fn kernel_targets(targets: Tensor<1, Int>) -> DispatchTensor {
    let targets = if targets.is_autodiff() {
        targets.inner()
    } else {
        targets
    };
    widened(targets).into_dispatch()
}

/// Converts the targets to a type that can hold every token: 32 or 64 bits.
fn widened(targets: Tensor<1, Int>) -> Tensor<1, Int> {
    match targets.dtype() {
        DType::I8 | DType::I16 | DType::U8 | DType::U16 => targets.cast(IntDType::I32),
        _ => targets,
    }
}

/// Returns the ignored target value, if the type of the targets can represent it.
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
            "statistics [{count}, {rows}, {statistics}] for targets [{given}]: expected [parts, {given}, {STATISTICS}] \
             with 1 part or more"
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
            "logits [{rows}, {width}] with a log-sum-exp [{sums}] and a gradient [{given}]: expected [{rows}] for both"
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

/// Checks the type of statistics, which depends on the type of the logits.
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
