//! Sums over tokens from which the auxiliary losses are computed.
//!
//! Let `s` be the scores of a token over all experts: a softmax, or sigmoids divided by their sum. `P_e` is the sum of
//! the scores of expert `e` over the tokens. With the counts `c_e` of choices and the number of tokens `T` that were
//! counted:
//!
//! ```text
//! load balancing    F = E / (k T^2) sum over e of P_e c_e      dF/ds_te = E c_e / (k T^2)
//! z-loss            Z = sum over t of lse_t^2, lse = log sum over e of exp(z_te)
//! ```
//!
//! `F` is 1 if all experts are used equally, and at most `E / k`. Counts have no gradient. Counts may be summed over
//! ranks while each rank's `P` covers its own tokens. Then the `F` of all ranks add up to the loss of all tokens. The
//! load balancing loss is from Shazeer et al. 2017 and Fedus et al. 2021, "Switch Transformers". The z-loss is from
//! Zoph et al. 2022, "ST-MoE".
//!
//! Tokens are consecutive sequences of equal length: the sequences of a micro-batch, or a single
//! sequence for all tokens. Everything is computed in f32 (f64 for f64), in an order that depends
//! only on the sizes.

use burn::tensor::{Bool, Int, IntDType, Tensor};

use crate::cpu::wide;
use crate::error::{accept, check_shape};
use crate::launch::launch_one;
use crate::{KernelError, apply};

mod backward;
pub mod composed;
mod cpu;
#[cfg(feature = "cubecl")]
pub(crate) mod kernel;
#[cfg(test)]
mod tests;

use super::permutation::sort::check_experts;
use super::score::ScoreFunction;
use backward::{RouterSums, SequenceSums, StatisticsOp, SumKind};

const NAME: &str = "router statistics";

/// Counts the tokens that choose each expert: `indices` `[tokens, k]` to `[sequences, experts]` in
/// I32. An index outside `0..experts` is not counted.
///
/// # Panics
///
/// Panics with a [`KernelError`] if there is no expert or more than 2048. Also panics if the number of sequences is 0
/// or does not divide the tokens.
pub fn count_experts(indices: Tensor<2, Int>, experts: usize, sequences: usize) -> Tensor<2, Int> {
    accept(check_experts(NAME, experts));
    accept(check_sequences(indices.dims()[0], sequences));
    let indices = indices.inner().cast(IntDType::I32).into_dispatch();
    let op = StatisticsOp::Count { experts, sequences };
    Tensor::from_dispatch(launch_one(op, vec![indices]))
}

/// Sums the scores of each expert: `logits` `[tokens, experts]` to `[sequences, experts]` in f32
/// (f64 for f64). The function is differentiable.
///
/// With [`ScoreFunction::Softmax`] and [`ScoreFunction::PreSoftmax`] the scores are the softmax
/// over all experts. Other scores are divided by their sum over all experts. `valid` `[tokens]` is
/// false for tokens that are left out. By default all tokens count.
///
/// # Panics
///
/// Panics with a [`KernelError`] in the same cases as [`count_experts`], and if `valid` has a different length.
///
/// # Example
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron_kernels::moe::router::ScoreFunction;
/// use burn_megatron_kernels::moe::statistics::{load_balancing_loss, sum_scores};
///
/// let device = Device::flex();
/// let scores = sum_scores(Tensor::zeros([8, 4], &device), ScoreFunction::Softmax, 1, None);
/// let counts = Tensor::from_floats([[4.0, 4.0, 4.0, 4.0]], &device);
/// assert_eq!(load_balancing_loss(scores, counts, 2).into_scalar::<f32>(), 1.0);
/// ```
pub fn sum_scores(
    logits: Tensor<2>,
    score: ScoreFunction,
    sequences: usize,
    valid: Option<Tensor<1, Bool>>,
) -> Tensor<2> {
    let [_, experts] = logits.dims();
    let sums = router_sums(logits, SumKind::Scores(score), sequences, valid);
    sums.reshape([sequences, experts])
}

/// Sums the squared log-sum-exp over tokens: `logits` `[tokens, experts]` to `[1]` in f32 (f64 for
/// f64). The function is differentiable: `dz_te = 2 lse_t softmax(z_t)_e` for a gradient of 1.
///
/// # Panics
///
/// Panics in the same cases as [`sum_scores`].
pub fn sum_squared_lse(logits: Tensor<2>, valid: Option<Tensor<1, Bool>>) -> Tensor<1> {
    router_sums(logits, SumKind::SquaredLse, 1, valid)
}

/// Returns the mean of the load balancing loss `F` over the sequences, `[1]` in the type of the
/// sums.
///
/// `score_sums` and `counts` are `[sequences, experts]`. The function is differentiable in the sums. The number of
/// tokens is the sum of the counts divided by `top_k`. A sequence without counts has the loss 0. Counts may be summed
/// over several ranks, or be the mean of several micro-batches.
///
/// # Panics
///
/// Panics with a [`KernelError`] if sizes do not agree.
pub fn load_balancing_loss(score_sums: Tensor<2>, counts: Tensor<2>, top_k: usize) -> Tensor<1> {
    let (sums, [sequences, experts]) = (score_sums.dims(), counts.dims());
    accept(check_shape(NAME, sums == [sequences, experts], || {
        format!(
            "sums of scores are {sums:?}, counts [{sequences}, {experts}]: expected equal shapes"
        )
    }));
    let counts = counts.inner().cast(score_sums.dtype());
    let total = counts.clone().sum_dim(1);
    let none = total.clone().equal_elem(0.0);
    let total = total.mask_fill(none, 1.0);
    let scale = (experts * top_k) as f64 / sequences as f64;
    let factors = (counts / (total.clone() * total)).mul_scalar(scale);
    (score_sums * factors).sum()
}

fn router_sums(
    logits: Tensor<2>,
    kind: SumKind,
    sequences: usize,
    valid: Option<Tensor<1, Bool>>,
) -> Tensor<1> {
    let [tokens, experts] = logits.dims();
    accept(check_experts(NAME, experts));
    accept(check_sequences(tokens, sequences));
    accept(check_valid(valid.as_ref(), tokens));
    let dtype = wide(logits.dtype());
    let function = RouterSums {
        sums: SequenceSums { kind, sequences },
        valid: valid.map(|valid| valid.inner().float().cast(dtype).into_dispatch()),
    };
    apply(vec![logits.into_dispatch()], function)
}

fn check_sequences(tokens: usize, sequences: usize) -> Result<(), KernelError> {
    let divides = sequences > 0 && tokens.is_multiple_of(sequences);
    check_shape(NAME, divides, || {
        format!("{sequences} sequences of {tokens} tokens: expected a divisor of {tokens}")
    })
}

fn check_valid(valid: Option<&Tensor<1, Bool>>, tokens: usize) -> Result<(), KernelError> {
    let length = valid.map_or(tokens, |valid| valid.dims()[0]);
    check_shape(NAME, length == tokens, || {
        format!("valid is [{length}] for {tokens} tokens: expected [{tokens}]")
    })
}
