//! Attention without its scores in memory.
//!
//! For query `i` and its visible keys `j`, with `s_ij = scale * q_i . k_j`:
//!
//! ```text
//! lse_i = ln(sum_j exp(s_ij) + exp(sink))        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j
//!
//! delta_i = do_i . o_i                           ds_ij = p_ij (do_i . v_j - delta_i)
//! dv_j = sum_i p_ij do_i     dq_i = scale * sum_j ds_ij k_j     dk_j = scale * sum_i ds_ij q_i
//! dsink = - sum_i exp(sink - lse_i) delta_i
//! ```
//!
//! Scores are computed tile by tile in both directions, so that memory is linear in the sequence
//! length. In addition to its inputs, the backward needs the output and one `lse` per query and
//! head. The tiles and the online softmax follow Dao et al., "FlashAttention" (2022) and
//! "FlashAttention-2" (2023). The sink is a learned logit per head without a value, after Xiao et
//! al., "Efficient Streaming Language Models with Attention Sinks" (2023).
//!
//! [`flash_attention`] and [`flash_attention_packed`] are recorded for the backward.
//! [`attention_forward`] and [`attention_backward`] are their two halves on plain tensors. Context
//! parallelism uses them to [`merge`](merge()) partial results. [`composed`] contains the same
//! functions composed of Burn's own operations, with the scores in memory.
//!
//! The implementation is an [`AttentionEngine`]: [`Portable`] or, on CUDA, `MmaTiles`, which uses
//! tensor cores. [`select_engine`] returns the engine for a device and a model.

use std::sync::Arc;

use burn::tensor::Tensor;

mod backward;
mod compare;
pub mod composed;
mod cpu;
mod engine;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod mask;
mod merge;
#[cfg(feature = "cubecl")]
mod mma;
mod ops;
mod options;
mod problem;
mod select;
#[cfg(test)]
mod tests;

use backward::Attention;
use problem::OPERATION;

pub use compare::{EngineMismatch, compare_with_portable};
pub use engine::{AttentionEngine, Portable};
pub use merge::merge;
#[cfg(feature = "cubecl")]
pub use mma::MmaTiles;
pub use options::{AttentionOptions, Heads, KeyRanges, Window};
pub use problem::{
    AttentionGradients, AttentionInputs, AttentionOutputs, AttentionProblem, BackwardInputs,
    MAX_WIDTH, ProjectionGradients, Projections,
};
pub use select::{EngineKind, SelectedEngine, select_engine};

use crate::KernelError;
use crate::cpu::wide;
use crate::error::accept;
use crate::function::apply;
use crate::gradient::FlatGradients;

/// Computes attention of `q` to `k` and `v`.
///
/// - `q`: `[batch, queries, heads, width]`.
/// - `k`: `[batch, keys, groups, width]`.
/// - `v`: `[batch, keys, groups, value width]`.
/// - `sink`: `[heads]`, one more logit in the softmax denominator of each row (an attention sink).
/// - returns `[batch, queries, heads, value width]` in the same type.
///
/// `heads` is a multiple of `groups`: each group serves `heads / groups` consecutive heads. The output of a query
/// without visible keys is 0. The inputs may be views. Views that are contiguous in their last dim are read in place.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - shapes or types do not agree,
/// - a head is wider than [`MAX_WIDTH`],
/// - the ranges have a different number of keys or queries,
/// - the device does not support the type.
pub fn flash_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<4> {
    flash_attention_with(Arc::new(Portable), q, k, v, sink, options)
}

/// Computes [`flash_attention`] with the given engine.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention`], and if the engine does not support the problem.
pub fn flash_attention_with(
    engine: Arc<dyn AttentionEngine>,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<4> {
    let problem = AttentionProblem::separate([&q, &k, &v], sink.as_ref(), options);
    let problem = accept(problem);
    let mut inputs = [q, k, v].map(Tensor::into_dispatch).to_vec();
    inputs.extend(widened(&problem, sink).map(Tensor::into_dispatch));
    apply(inputs, step(engine, problem))
}

/// Computes attention of a joint projection `qkv`, `[batch, seq, (heads + 2 groups) * width]`, and
/// returns `[batch, seq, heads * width]`.
///
/// The features of `qkv` are all query heads, then the groups of keys, then the groups of values.
/// `qkv` is not split, and its gradient is written as one tensor. See [`flash_attention`].
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention`], and if `qkv` does not hold these `heads`.
pub fn flash_attention_packed(
    qkv: Tensor<3>,
    heads: Heads,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<3> {
    flash_attention_packed_with(Arc::new(Portable), qkv, heads, sink, options)
}

/// Computes [`flash_attention_packed`] with the given engine.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention_packed`], and if the engine does not support the
/// problem.
pub fn flash_attention_packed_with(
    engine: Arc<dyn AttentionEngine>,
    qkv: Tensor<3>,
    heads: Heads,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<3> {
    let problem = AttentionProblem::packed(&qkv, heads, sink.as_ref(), options);
    let problem = accept(problem);
    let mut inputs = vec![qkv.into_dispatch()];
    inputs.extend(widened(&problem, sink).map(Tensor::into_dispatch));
    apply(inputs, step(engine, problem))
}

/// Computes [`flash_attention_with`] on plain tensors (no autodiff), and the log-sum-exp of each
/// query's scores.
///
/// The log-sum-exp is `[batch, heads, queries]`, in f64 for f64 and otherwise in f32. It includes
/// the sink, and is minus infinity if no key is visible.
///
/// Two results on different keys can be merged: `lse = ln(e^lse1 + e^lse2)`, `out = e^(lse1 - lse) out1 + e^(lse2 -
/// lse) out2`. Only one of the two calls may have the sink. If no key is visible, nothing is launched.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention_with`].
pub fn attention_forward(
    engine: &dyn AttentionEngine,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> (Tensor<4>, Tensor<3>) {
    let problem = AttentionProblem::separate([&q, &k, &v], sink.as_ref(), options);
    let problem = accept(problem);
    check_support(engine, &problem);
    let outputs = engine.forward(&problem, separate([q, k, v], &problem, sink));
    (outputs.out, outputs.lse)
}

/// Computes the gradients of [`attention_forward`] from the gradient `dout` of its output, on plain
/// tensors.
///
/// `result` holds output and log-sum-exp, which may be merged from several calls on different keys. The function then
/// returns the part of the gradients that belongs to these keys. The gradient of the queries is the sum of all parts.
///
/// With `sums`, the gradients of keys and values are written or added to two places of a flat
/// buffer in f32 (f64 for f64). They are stored as contiguous `[batch, keys, groups, width]` and
/// `[batch, keys, groups, value width]`. Each place must start at a multiple of 4 elements.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention_with`]. Also panics if `result` or `dout` do not
/// fit the problem, or if the buffer cannot hold the gradients.
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    engine: &dyn AttentionEngine,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    result: (Tensor<4>, Tensor<3>),
    dout: Tensor<4>,
    options: &AttentionOptions,
    sums: Option<FlatGradients>,
) -> AttentionGradients {
    let problem = AttentionProblem::separate([&q, &k, &v], sink.as_ref(), options);
    let problem = accept(problem);
    accept(problem.check_result(&result, &dout, sums.as_ref()));
    check_support(engine, &problem);
    let narrow = sink.as_ref().map(|sink| sink.dtype());
    let inputs = BackwardInputs {
        inputs: separate([q, k, v], &problem, sink),
        result,
        dout,
        sums,
    };
    let mut gradients = engine.backward(&problem, inputs);
    let dsink = gradients.dsink.zip(narrow);
    gradients.dsink = dsink.map(|(dsink, dtype)| dsink.cast(dtype));
    gradients
}

fn separate(
    [q, k, v]: [Tensor<4>; 3],
    problem: &AttentionProblem,
    sink: Option<Tensor<1>>,
) -> AttentionInputs {
    AttentionInputs {
        projections: Projections::Separate { q, k, v },
        sink: widened(problem, sink),
    }
}

/// Returns the sink in the type of the statistics.
fn widened(problem: &AttentionProblem, sink: Option<Tensor<1>>) -> Option<Tensor<1>> {
    sink.map(|sink| sink.cast(wide(problem.dtype)))
}

fn step(engine: Arc<dyn AttentionEngine>, problem: AttentionProblem) -> Attention {
    check_support(&*engine, &problem);
    Attention { engine, problem }
}

fn check_support(engine: &dyn AttentionEngine, problem: &AttentionProblem) {
    accept(problem.check_widths());
    let supported = match problem.options.soft_cap {
        Some(cap) => Err(format!(
            "only composed attention supports a soft cap, got {cap}"
        )),
        None => engine.supports(problem),
    };
    accept(supported.map_err(|reason| {
        let message = format!(
            "the engine {:?} does not support this problem: {reason}; use the engine {:?}",
            engine.name(),
            Portable.name()
        );
        KernelError::shape(OPERATION, message)
    }))
}
