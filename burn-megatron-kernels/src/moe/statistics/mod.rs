//! Sums over tokens, from which the auxiliary losses are computed.
//!
//! Let `s` be the normalized scores of a token over all experts, such as a softmax, or sigmoids divided by their sum.
//! `P_e` is the sum of the scores of expert `e` over the tokens. `c_e` is the number of tokens that choose expert `e`,
//! and `T` is the number of tokens that are included in these counts:
//!
//! ```text
//! load balancing    F = E / (k T^2) sum over e of P_e c_e      dF/ds_te = E c_e / (k T^2)
//! z-loss            Z = sum over t of lse_t^2, lse = log sum over e of exp(z_te)
//! ```
//!
//! `F` is 1 if all experts are used equally, and at most `E / k`. Counts have no gradient. The counts may be summed
//! over all ranks, while `P` covers only the tokens of one rank. In this case, the sum of `F` over all ranks is the
//! load balancing loss of all tokens. The load balancing loss is from Shazeer et al. 2017 and Fedus et al. 2021,
//! "Switch Transformers". The z-loss is from Zoph et al. 2022, "ST-MoE".
//!
//! The functions split the tokens into `sequences` consecutive sequences of equal length. Pass the number of sequences
//! of a micro-batch, or 1 to treat all tokens as a single sequence. All values are computed in f32 (f64 for f64), in an
//! order that depends only on the sizes.

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

/// Counts the tokens that choose each expert. `indices` is `[tokens, k]`, and the result is `[sequences, experts]` in
/// I32. An index outside `0..experts` is not counted.
///
/// # Panics
///
/// Panics with a [`KernelError`] if there are no experts or more than 2048 experts. Also panics if the number of
/// sequences is 0 or is not a divisor of the number of tokens.
pub fn count_experts(indices: Tensor<2, Int>, experts: usize, sequences: usize) -> Tensor<2, Int> {
    accept(check_experts(NAME, experts));
    accept(check_sequences(indices.dims()[0], sequences));
    let indices = indices.inner().cast(IntDType::I32).into_dispatch();
    let op = StatisticsOp::Count { experts, sequences };
    Tensor::from_dispatch(launch_one(op, vec![indices]))
}

/// Sums the scores of each expert over the tokens of each sequence. `logits` is `[tokens, experts]`, and the result is
/// `[sequences, experts]` in f32 (f64 for f64). The function is differentiable.
///
/// With [`ScoreFunction::Softmax`] and [`ScoreFunction::PreSoftmax`] the scores are the softmax over all experts. Other
/// scores are divided by their sum over all experts. `valid`, `[tokens]`, is true for tokens that are included. Without
/// `valid`, all tokens are included.
///
/// # Panics
///
/// Panics with a [`KernelError`] in the same cases as [`count_experts`], and if the length of `valid` differs from the
/// number of tokens.
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

/// Sums the squared log-sum-exp of the logits over all tokens. `logits` is `[tokens, experts]`, and the result is `[1]`
/// in f32 (f64 for f64). The function is differentiable: the gradient is `dz_te = 2 lse_t softmax(z_t)_e`.
///
/// # Panics
///
/// Panics in the same cases as [`sum_scores`].
pub fn sum_squared_lse(logits: Tensor<2>, valid: Option<Tensor<1, Bool>>) -> Tensor<1> {
    router_sums(logits, SumKind::SquaredLse, 1, valid)
}

/// Returns the load balancing loss `F` (see the [module](self)), averaged over the sequences. The result is `[1]` in
/// the type of `score_sums`.
///
/// `score_sums` (see [`sum_scores`]) and `counts` (see [`count_experts`]) are `[sequences, experts]`. The function is
/// differentiable in `score_sums`. The number of tokens is the sum of the counts divided by `top_k`. If all counts of a
/// sequence are 0, its loss is 0. `counts` may be sums over several ranks, or means over several micro-batches.
///
/// # Panics
///
/// Panics with a [`KernelError`] if the sizes do not match.
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
