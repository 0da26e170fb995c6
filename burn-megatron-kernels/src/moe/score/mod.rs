//! Score functions, which compute the scores of the experts from the logits of a token.
//!
//! The formulas use the numerator `n(z)` of a score and the sum `D` of the numerators that share a denominator:
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

/// The function that computes the scores of experts from the logits. It also determines the weights of the chosen
/// experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoreFunction {
    /// Experts are chosen by their logits. The weights are the softmax over the logits of the chosen experts. If a
    /// token chooses one expert, the weight is constant and has no gradient.
    Softmax,
    /// Experts are chosen by the softmax over all experts. The weights are these softmax values. The weights of the
    /// chosen experts are not normalized to a sum of 1.
    PreSoftmax,
    /// Experts are chosen by the sigmoid of their logits. The weights are these scores. By default, they are divided by
    /// their sum if a token chooses several experts.
    Sigmoid,
    /// Experts are chosen by the square root of the softplus of their logits. The weights are computed from these
    /// scores as with [`Sigmoid`](Self::Sigmoid).
    SqrtSoftplus,
}

/// The number that is added to a sum of scores. It keeps the sum above 0 if all scores underflow.
const SMALLEST_SUM: f64 = 1e-20;

impl ScoreFunction {
    /// Returns whether the score is a softmax, over all experts or over the chosen experts.
    pub(super) fn is_softmax(self) -> bool {
        matches!(self, Self::Softmax | Self::PreSoftmax)
    }
}
