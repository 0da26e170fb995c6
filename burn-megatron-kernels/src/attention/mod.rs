//! Attention that does not store its scores in memory.
//!
//! Attention computes the following values for a query `i` and its visible keys `j`, with the scores
//! `s_ij = scale * q_i . k_j`:
//!
//! ```text
//! lse_i = ln(sum_j exp(s_ij) + exp(sink))        p_ij = exp(s_ij - lse_i)        o_i = sum_j p_ij v_j
//!
//! delta_i = do_i . o_i                           ds_ij = p_ij (do_i . v_j - delta_i)
//! dv_j = sum_i p_ij do_i     dq_i = scale * sum_j ds_ij k_j     dk_j = scale * sum_i ds_ij q_i
//! dsink = - sum_i exp(sink - lse_i) delta_i
//! ```
//!
//! Scores are computed tile by tile in the forward and the backward pass, so that memory is linear in the sequence
//! length. For the backward pass, attention saves its inputs, the output, and one `lse` per query and head. The tiles
//! and the online softmax follow Dao et al., "FlashAttention" (2022) and "FlashAttention-2" (2023). The sink is a
//! learned logit per head without a value, after Xiao et al., "Efficient Streaming Language Models with Attention
//! Sinks" (2023).
//!
//! [`flash_attention`] and [`flash_attention_packed`] support autodiff. [`attention_forward`] and
//! [`attention_backward`] compute the forward and the backward pass on plain tensors. Context parallelism uses them to
//! [`merge`](merge()) partial results. [`composed`] contains reference implementations of the same functions with
//! Burn's own operations. The reference implementations store the scores.
//!
//! An [`AttentionEngine`] is an implementation of attention: [`Portable`] or, on CUDA, `MmaTiles`, which uses tensor
//! cores. [`select_engine`] returns the engine for a device and a model.

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

/// Computes attention of the queries `q` to the keys `k` and the values `v`.
///
/// - `q`: `[batch, queries, heads, width]`.
/// - `k`: `[batch, keys, groups, width]`.
/// - `v`: `[batch, keys, groups, value width]`.
/// - `sink`: `[heads]`, one additional logit per head in the softmax denominator (an attention sink).
/// - returns `[batch, queries, heads, value width]` in the type of the inputs.
///
/// `heads` must be a multiple of `groups`. Each group of keys and values serves `heads / groups` consecutive query
/// heads. The output of a query without visible keys is 0. The inputs may be views. Views whose last dimension is
/// contiguous are read without a copy.
///
/// # Panics
///
/// Panics with a [`KernelError`] if
/// - shapes or types do not match,
/// - a head is wider than [`MAX_WIDTH`],
/// - the number of keys or queries differs from the number in `options.ranges`,
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

/// Computes self-attention from a joint projection `qkv`, `[batch, seq, (heads + 2 groups) * width]`, and returns
/// `[batch, seq, heads * width]`.
///
/// The features of `qkv` are the query heads, followed by the key heads and the value heads. `qkv` is not split, and
/// its gradient is one tensor. See [`flash_attention`].
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention`], and if the shape of `qkv` does not match `heads`.
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

/// Computes [`flash_attention_with`] on plain tensors (without autodiff). Returns the output and the log-sum-exp of
/// each query's scores.
///
/// The log-sum-exp is `[batch, heads, queries]`, in f64 for f64 and otherwise in f32. It includes the sink. Without a
/// sink, it is minus infinity for a query without visible keys.
///
/// [`merge`](merge()) combines two results for the same queries and different keys. If there is a sink, pass it to only
/// one of the two calls. If no key is visible, no kernel is launched.
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

/// Computes the gradients of [`attention_forward`] from the gradient `dout` of its output, on plain tensors (without
/// autodiff).
///
/// `result` holds the output and the log-sum-exp. Both may be the merged results of several calls of
/// [`attention_forward`] with different keys. In this case, call this function once with the keys of each call. Each
/// call returns the gradients of its keys and values. The gradient of the queries is the sum of the results of all
/// calls.
///
/// If `sums` is given, the gradients of keys and values are written to or added to two places of a flat buffer in f32
/// (f64 for f64). They are stored as contiguous `[batch, keys, groups, width]` and
/// `[batch, keys, groups, value width]`. Each place must start at a multiple of 4 elements.
///
/// # Panics
///
/// Panics in the same cases as [`flash_attention_with`]. Also panics if the shapes or types of `result` or `dout` do
/// not match the inputs, or if the buffer cannot hold the gradients.
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

/// Returns the sink in the type of the softmax statistics.
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
