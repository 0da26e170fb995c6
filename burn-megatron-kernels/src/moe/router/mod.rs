//! The top-k router: chooses `k` experts for each token and computes their weights.
//!
//! In the table, `z` are the logits `[tokens, experts]`, `S` are the chosen experts of a token, `c` is the scaling
//! factor, and `g` is the gradient of the weights `p`:
//!
//! | score | experts are chosen by | weight | backward |
//! |---|---|---|---|
//! | `Softmax` | `z` | `c softmax over S of z` | `dz_i = p_i (g_i - sum of g_j p_j / c)` on `S` |
//! | `PreSoftmax` | `s = softmax(z)` | `c s_i` | `dz_e = s_e (ds_e - sum of ds_j s_j)`, `ds = c g` on `S` |
//! | `Sigmoid` | `s = sigmoid(z)` | `c s_i / D` | `dz_i = ds_i s_i (1 - s_i)`, `ds_i = c / D (g_i - sum of g_j s_j / D)` |
//! | `SqrtSoftplus` | `s = sqrt(ln(1 + e^z))` | as `Sigmoid` | `dz_i = ds_i sigmoid(z_i) / (2 s_i)` |
//!
//! `D` is 1e-20 plus the sum of `s` over `S`. If the weights are not [normalized](RouterOptions::normalized), which is
//! the default for `k = 1`, the weights of `Sigmoid` and `SqrtSoftplus` are `p = c s`. If the softmax over all experts
//! is divided by its sum over the chosen experts, the result equals the weights of `Softmax`.
//!
//! All values are computed in f32 (f64 for f64). Experts are ranked by score (largest first), then by index (smallest
//! first). A score that is NaN or below the lowest finite f32 is treated as the lowest finite f32.

use burn::tensor::{Int, IntDType, Tensor};

use crate::cpu::wide;
use crate::error::{accept, check_shape};
use crate::launch::launch_one;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
mod options;
#[cfg(test)]
pub(super) mod tests;

pub use super::score::ScoreFunction;
pub use options::{ExpertGroups, GroupScore, RouterOptions};

use backward::{RouterOp, RouterWeights};

const NAME: &str = "top_k_router";

/// The score that replaces NaN and lower scores.
const LOWEST: f32 = f32::MIN;

/// Chooses `k` experts for each token. Returns the indices of the experts, best first, `[tokens, k]` in I32, and their
/// weights, `[tokens, k]` in f32 (f64 for f64).
///
/// - `logits`: `[tokens, experts]`.
/// - `bias`: `[experts]`, an optional bias of the scores.
///
/// The bias is added to the scores that select experts and groups. With [`ScoreFunction::Softmax`] these scores are the
/// logits. The bias does not affect the weights of the chosen experts and has no gradient. Only the weights are
/// differentiable.
///
/// # Panics
///
/// Panics with a [`KernelError`] if [`RouterOptions::check`] fails, or if the length of the bias differs from the
/// number of experts.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::moe::router::{RouterOptions, top_k_router};
///
/// let logits = Tensor::<2>::from_floats([[0.0, 3.0, 3.0, 1.0]], &Device::flex());
/// let (indices, weights) = top_k_router(logits, &RouterOptions::new(2), None);
/// assert_eq!(indices.into_data().iter::<i32>().collect::<Vec<_>>(), [1, 2]);
/// assert_eq!(weights.into_data().try_into_vec::<f32>().unwrap(), [0.5, 0.5]);
/// ```
pub fn top_k_router(
    logits: Tensor<2>,
    options: &RouterOptions,
    bias: Option<Tensor<1>>,
) -> (Tensor<2, Int>, Tensor<2>) {
    let [_, experts] = logits.dims();
    accept(options.check(experts));
    accept(check_bias(bias.as_ref(), experts));
    let dtype = wide(logits.dtype());
    let bias = bias.map(|bias| bias.inner().cast(dtype).into_dispatch());
    let inputs = [Some(logits.clone().inner().into_dispatch()), bias];
    let op = RouterOp::Choose(*options);
    let indices = launch_one(op, inputs.into_iter().flatten().collect());
    let indices = Tensor::from_dispatch(indices);
    (indices.clone(), router_weights(logits, indices, options))
}

/// Computes the weights of experts that have already been chosen, `[tokens, k]` in f32 (f64 for f64).
///
/// - `logits`: `[tokens, experts]`.
/// - `indices`: `[tokens, k]`, the chosen experts, for example from an earlier call of [`top_k_router`].
///
/// The chosen experts of a token must be distinct. An index outside `0..experts` has weight 0 and no gradient. It does
/// not contribute to the sum that normalizes the other weights.
///
/// # Panics
///
/// Panics with a [`KernelError`] if [`RouterOptions::check`] fails, or if the shape of `indices` is wrong.
pub fn router_weights(
    logits: Tensor<2>,
    indices: Tensor<2, Int>,
    options: &RouterOptions,
) -> Tensor<2> {
    let [tokens, experts] = logits.dims();
    accept(options.check(experts));
    accept(check_indices(indices.dims(), [tokens, options.top_k]));
    let function = RouterWeights {
        options: *options,
        indices: indices.inner().cast(IntDType::I32).into_dispatch(),
    };
    apply(vec![logits.into_dispatch()], function)
}

fn check_bias(bias: Option<&Tensor<1>>, experts: usize) -> Result<(), KernelError> {
    let length = bias.map_or(experts, |bias| bias.dims()[0]);
    check_shape(NAME, length == experts, || {
        format!("a bias [{length}] for {experts} experts: expected [{experts}]")
    })
}

fn check_indices(given: [usize; 2], expected: [usize; 2]) -> Result<(), KernelError> {
    check_shape(NAME, given == expected, || {
        format!("indices {given:?}: expected [tokens, top_k] = {expected:?}")
    })
}
