//! Masked softmax: one operation that scales and masks attention scores and computes their softmax.
//!
//! For a row of scores `x` with the visible keys `S` and an optional sink with the logit `s`, the probabilities are:
//!
//! ```text
//! p_j = exp(scale x_j) / (sum over k in S of exp(scale x_k) + exp(s))    for j in S, else 0
//! ```
//!
//! The sink is one additional logit in the softmax denominator. Its probability is not part of the output. The logit of
//! the sink is 0 for "softmax off by one" (Miller, "Attention is off by one", 2023). In gpt-oss, each head has a
//! learned logit.
//!
//! The backward pass needs only the output. With `D = sum of dp_j p_j`, the gradient of a score is
//! `dx_j = scale p_j (dp_j - D)`. The gradient of the logit of the sink is the sum of `-p_s D` over the rows, where
//! `p_s` is the probability of the sink.

use burn::tensor::{Bool, Int, IntDType, Tensor};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::accept;

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

use backward::MaskedSoftmax;

const NAME: &str = "masked_softmax";

/// The mask, which determines the visible keys of each query.
#[derive(Clone, Debug, Default)]
pub enum Mask {
    /// All keys are visible.
    #[default]
    None,
    /// Causal mask: key `j` is visible to query `i` if `j <= i + (keys - queries)`. The last query and the last key
    /// have the same position.
    Causal,
    /// Sliding window: key `j` is visible to query `i` if `i + shift - left <= j <= i + shift + right`, with
    /// `shift = keys - queries`.
    Window {
        /// The number of visible keys before the position of the query.
        left: usize,
        /// The number of visible keys after the position of the query.
        right: usize,
    },
    /// Padding mask: the number of visible keys of each sequence, `[batch]`. The visible keys are the first keys of the
    /// sequence. A number outside `0..=keys` is clamped to this range.
    Lengths(Tensor<1, Int>),
    /// A tensor that is true for masked keys, `[batch or 1, heads or 1, queries, keys]`.
    Hidden(Tensor<4, Bool>),
}

/// An attention sink: one additional logit in the softmax denominator of each row.
#[derive(Clone, Debug, Default)]
pub enum Sink {
    /// No sink.
    #[default]
    None,
    /// A sink with the constant logit 0.
    OffByOne,
    /// A sink with a learned logit per head, `[heads]` of any float type. The logit is not multiplied by the scale.
    PerHead(Tensor<1>),
}

/// Multiplies scores by `scale`, masks them and returns their softmax over the keys. Scores and result are
/// `[batch, heads, queries, keys]` in the same type. The softmax is computed in f32 (f64 for f64).
///
/// If no key of a row is visible, the row of the result and its gradient are 0. The score of a masked key is ignored,
/// even if it is infinite or NaN. If a visible score is NaN, the probabilities of all visible keys of its row are NaN.
/// A visible score is treated as masked if it is -inf, or if the scaled score is at most the lowest finite f32. The
/// backward pass ignores the gradients of probabilities that are 0.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - the scale is not finite,
/// - the shape of the mask or of the sink does not match the scores,
/// - the sum of the numbers of queries and keys exceeds 2^30,
/// - the device does not support the element type.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::softmax::{Mask, Sink, masked_softmax};
///
/// let scores = Tensor::<4>::zeros([1, 1, 2, 2], &Device::flex());
/// let p = masked_softmax(scores, 0.125, &Mask::Causal, Sink::None);
/// assert_eq!(p.into_data().try_into_vec::<f32>().unwrap(), [1.0, 0.0, 0.5, 0.5]);
/// ```
pub fn masked_softmax(scores: Tensor<4>, scale: f64, mask: &Mask, sink: Sink) -> Tensor<4> {
    let shape = scores.dims();
    accept(check(shape, scale, mask, &sink));
    if shape.contains(&0) {
        return scores;
    }
    let [_, _, queries, keys] = shape;
    let (span, hidden, tensor) = match mask {
        Mask::None => (KeyRange::All, None, None),
        Mask::Causal => (KeyRange::window(usize::MAX, 0, queries, keys), None, None),
        Mask::Window { left, right } => {
            (KeyRange::window(*left, *right, queries, keys), None, None)
        }
        Mask::Lengths(lengths) => {
            let lengths = lengths.clone().inner().clamp(0, keys as i64);
            let lengths = lengths.cast(IntDType::I32).into_dispatch();
            (KeyRange::Lengths, None, Some(lengths))
        }
        Mask::Hidden(hidden) => {
            let [batches, heads, ..] = hidden.dims();
            let tensor = hidden.clone().inner().into_dispatch();
            (KeyRange::All, Some([batches, heads]), Some(tensor))
        }
    };
    let statistics = wide(scores.dtype());
    let mut inputs = vec![scores.into_dispatch()];
    let sink = match sink {
        Sink::None => SinkKind::None,
        Sink::OffByOne => SinkKind::Zero,
        Sink::PerHead(logits) => {
            inputs.push(logits.cast(statistics).into_dispatch());
            SinkKind::Learned
        }
    };
    let plan = SoftmaxProblem {
        shape,
        scale,
        span,
        hidden,
        sink,
    };
    crate::apply(inputs, MaskedSoftmax { plan, mask: tensor })
}

/// The sizes and the options of a softmax call, without its tensors.
#[derive(Clone, Copy, Debug)]
struct SoftmaxProblem {
    /// The shape of the scores, `[batch, heads, queries, keys]`.
    shape: [usize; 4],
    scale: f64,
    span: KeyRange,
    /// The numbers of batches and heads of the mask tensor.
    hidden: Option<[usize; 2]>,
    sink: SinkKind,
}

impl SoftmaxProblem {
    fn rows(&self) -> usize {
        self.shape[..3].iter().product()
    }
}

/// The visible keys of a row, without the mask tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KeyRange {
    All,
    Window { left: usize, right: usize },
    Lengths,
}

impl KeyRange {
    /// Returns a window that is limited by the number of queries and keys, so that sums with its sides do not overflow.
    fn window(left: usize, right: usize, queries: usize, keys: usize) -> Self {
        Self::Window {
            left: left.min(queries + keys),
            right: right.min(queries + keys),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SinkKind {
    None,
    Zero,
    Learned,
}

/// The maximum sum of the numbers of queries and keys. Positions are compared in 32 bits.
const MAX_POSITIONS: usize = 1 << 30;

fn check(shape: [usize; 4], scale: f64, mask: &Mask, sink: &Sink) -> Result<(), KernelError> {
    let [batch, heads, queries, keys] = shape;
    let refuse = |message: String| Err(KernelError::shape(NAME, message));
    if !scale.is_finite() {
        return Err(KernelError::option(NAME, "scale", scale, "a finite number"));
    }
    if queries.saturating_add(keys) > MAX_POSITIONS {
        return refuse(format!(
            "{queries} queries and {keys} keys: expected at most {MAX_POSITIONS} together"
        ));
    }
    match mask {
        Mask::Lengths(lengths) if lengths.dims() != [batch] => {
            return refuse(format!(
                "lengths {:?} do not fit scores {shape:?}: expected [{batch}]",
                lengths.dims()
            ));
        }
        Mask::Hidden(hidden) => {
            let given = hidden.dims();
            let fits = |dim: usize| given[dim] == 1 || given[dim] == shape[dim];
            if !(fits(0) && fits(1)) || given[2..] != shape[2..] {
                return refuse(format!(
                    "a mask {given:?} does not fit scores {shape:?}: expected [{batch} or 1, {heads} or \
                     1, {queries}, {keys}]"
                ));
            }
        }
        _ => {}
    }
    match sink {
        Sink::PerHead(logits) if logits.dims() != [heads] => refuse(format!(
            "sinks {:?} do not fit scores {shape:?}: expected [{heads}]",
            logits.dims()
        )),
        _ => Ok(()),
    }
}
