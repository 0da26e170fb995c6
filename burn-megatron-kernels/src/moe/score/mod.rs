//! Scores of experts: functions of the logits of a token.
//!
//! With `n(z)` the numerator of a score and `D` the sum of the numerators that share a denominator,
//!
//! ```text
//! softmax       n = exp(z - largest)      d (n / D)_e = (n_e / D) (g_e - sum of g_j n_j / D)
//! sigmoid       n = 1 / (1 + exp(-z))     d (n / D)_e = (n'_e / D) (g_e - sum of g_j n_j / D)
//! sqrt-softplus n = sqrt(ln(1 + exp(z)))  as sigmoid, with n' = sigmoid(z) / (2 n)
//! ```

pub(super) mod cpu;
#[cfg(feature = "cubecl")]
pub(super) mod kernel;
#[cfg(feature = "cubecl")]
pub(super) mod row;

/// The function from logits to scores, and from scores to weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreFunction {
    /// Experts are chosen by their logits; weights are the softmax over those of the chosen ones. Of one
    /// chosen expert the weight is constant, and has no gradient.
    Softmax,
    /// The softmax over all experts, which the weights are too: they do not add up to 1.
    PreSoftmax,
    /// The sigmoid; by default, weights of more than one chosen expert are divided by their sum.
    Sigmoid,
    /// The square root of softplus; weights as for [`Sigmoid`](Self::Sigmoid).
    SqrtSoftplus,
}

/// Keeps the sum of scores that have all underflowed from 0.
const SMALLEST_SUM: f64 = 1e-20;

impl ScoreFunction {
    /// Whether a score is a part of the sum of all exponentials.
    pub(super) fn is_softmax(self) -> bool {
        matches!(self, Self::Softmax | Self::PreSoftmax)
    }
}
