//! Attention without its scores in memory.
//!
//! For query `i` and the keys `j` that it sees, with `s_ij = scale * q_i . k_j`:
//!
//! ```text
//! lse_i = ln(sum_j exp(s_ij) + exp(sink))        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j
//!
//! delta_i = do_i . o_i                           ds_ij = p_ij (do_i . v_j - delta_i)
//! dv_j = sum_i p_ij do_i     dq_i = scale * sum_j ds_ij k_j     dk_j = scale * sum_i ds_ij q_i
//! dsink = - sum_i exp(sink - lse_i) delta_i
//! ```
//!
//! Scores are computed tile by tile in both directions, so memory is linear in the sequence: beside
//! its inputs the backward holds the output and one `lse` per query and head. The tiles and the
//! softmax of a row in one pass follow Dao et al., "FlashAttention" (2022) and "FlashAttention-2"
//! (2023); the sink is the logit without a value of Xiao et al., "Efficient Streaming Language
//! Models with Attention Sinks" (2023), learned for each head.
//!
//! [`flash_attention`] and [`flash_attention_packed`] are recorded for the backward.
//! [`attention_forward`] and [`attention_backward`] are their two halves on plain tensors, for
//! callers who [`merge`](merge()) partial results, as context parallelism does. [`composed`] is the same of
//! Burn's own operations, with the scores in memory.
//!
//! The implementation is an [`AttentionEngine`]: [`Portable`] or, on CUDA, `MmaTiles`, which uses the
//! matrix units of a device. [`select_engine`] returns the one for a device and a model.

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

/// Attention of `q` `[batch, queries, heads, width]` to `k` `[batch, keys, groups, width]` and `v`
/// `[batch, keys, groups, value width]`, giving `[batch, queries, heads, value width]` in the same type.
///
/// `heads` is a multiple of `groups`: each group serves `heads / groups` consecutive heads. `sink`
/// `[heads]` is one more logit in the sum of each row's softmax. A query that sees no key gives 0.
/// The inputs may be views; what is contiguous in its last dim is read in place.
///
/// # Panics
///
/// With a [`KernelError`]: shapes or types that do not agree, a head wider than [`MAX_WIDTH`],
/// ranges of other keys or queries, a type that the device does not support.
pub fn flash_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<4> {
    flash_attention_with(Arc::new(Portable), q, k, v, sink, options)
}

/// [`flash_attention`] by an engine of the caller's choice.
///
/// # Panics
///
/// As [`flash_attention`], and when the engine does not take the problem.
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

/// Attention of a joint projection `[batch, seq, (heads + 2 groups) * width]`, all query heads, then
/// the groups of keys, then those of values, giving `[batch, seq, heads * width]`.
///
/// Nothing is cut out of `qkv`, and its gradient is written as one tensor. See [`flash_attention`].
///
/// # Panics
///
/// As [`flash_attention`], and when `qkv` does not hold these `heads`.
pub fn flash_attention_packed(
    qkv: Tensor<3>,
    heads: Heads,
    sink: Option<Tensor<1>>,
    options: &AttentionOptions,
) -> Tensor<3> {
    flash_attention_packed_with(Arc::new(Portable), qkv, heads, sink, options)
}

/// [`flash_attention_packed`] by an engine of the caller's choice.
///
/// # Panics
///
/// As [`flash_attention_packed`], and when the engine does not take the problem.
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

/// [`flash_attention_with`] of plain tensors (no autodiff), with the log-sum-exp `[batch, heads,
/// queries]` of each query's scores: f64 for f64, otherwise f32.
///
/// The log-sum-exp includes the sink, and is minus infinity where no key is visible. Two results on
/// different keys make one: `lse = ln(e^lse1 + e^lse2)`, `out = e^(lse1 - lse) out1 + e^(lse2 -
/// lse) out2`. Then only one of them may be given the sink. Where no query sees a key, nothing is
/// launched.
///
/// # Panics
///
/// See [`flash_attention_with`].
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

/// The gradients of [`attention_forward`] for the gradient `dout` of its output; plain tensors.
///
/// `result`, output and log-sum-exp, may be merged from several calls on different keys. Then the
/// gradients are the part of these keys; the sum of all parts is that of the queries. With `sums` of
/// two places, the gradients of keys and values are written or added there, in f32 (f64 for f64), as
/// contiguous `[batch, keys, groups, width]` and `[batch, keys, groups, value width]`, each from a
/// multiple of 4 elements on.
///
/// # Panics
///
/// As [`flash_attention_with`], and when `result` or `dout` are not of this problem, or the buffer
/// does not hold the gradients.
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

/// The sink in the type of the statistics.
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
            "a soft cap of {cap}, which only composed attention has"
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
