//! The losses of tokens, and their terms.

use burn::tensor::Tensor;

/// A term of the objective in addition to the cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTerm {
    /// The label smoothing term: `s (log p[t] - mean over k of log p[k])`.
    LabelSmoothing,
    /// The z-loss: the squared log-sum-exp, times its weight.
    ZLoss,
    /// The multi-token prediction loss: the objectives of the additional tokens, times their weight.
    FurtherTokens,
}

/// The losses of tokens, each `[batch, seq]`. They are the same on every rank of the tensor axis.
///
/// Training minimizes the objective. The cross-entropy is reported as the loss, so that runs with different terms can
/// be compared.
#[derive(Clone, Debug)]
pub struct Losses {
    /// The sum of the cross-entropy and all terms. The backward starts here.
    pub objective: Tensor<2>,
    /// The cross-entropy, followed by the terms in the order [listed](crate::model::LanguageModel::loss_terms) by the
    /// model, without autodiff. Empty if the objective is only the cross-entropy.
    pub parts: Vec<Tensor<2>>,
}

/// The losses `[tokens]`, or their sum `[1]` if their factor is known, and the parts.
pub(super) type TokenLosses = (Tensor<1>, Vec<Tensor<2>>);

/// The sums of losses over tokens.
#[derive(Clone, Debug)]
pub struct SummedLosses {
    /// The sum of the objective, `[1]`. The backward starts here.
    pub objective: Tensor<1>,
    /// The sum of each part, `[parts]`, without autodiff. `None` if there are no parts.
    pub parts: Option<Tensor<1>>,
}

impl Losses {
    /// Creates the losses from the objective of each token, `[batch * seq]`, and the parts.
    pub(super) fn of_tokens((objective, parts): TokenLosses, shape: [usize; 2]) -> Self {
        Self {
            objective: objective.reshape(shape),
            parts,
        }
    }

    /// Returns the sums over the tokens.
    pub fn sums(self) -> SummedLosses {
        SummedLosses::new(self.objective.sum(), &self.parts)
    }
}

impl SummedLosses {
    /// Creates the sums from the summed objective and the parts.
    pub(super) fn new(objective: Tensor<1>, parts: &[Tensor<2>]) -> Self {
        let sums = parts.iter().map(|part| part.clone().sum());
        let parts = (!parts.is_empty()).then(|| Tensor::cat(sums.collect(), 0));
        Self { objective, parts }
    }
}

/// Creates losses whose objective is only the cross-entropy.
impl From<Tensor<2>> for Losses {
    fn from(objective: Tensor<2>) -> Self {
        let parts = vec![];
        Self { objective, parts }
    }
}
