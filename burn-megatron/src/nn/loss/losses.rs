//! The losses of tokens and their terms.

use burn::tensor::Tensor;

/// A term of the objective in addition to the cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTerm {
    /// The term of label smoothing: `s (log p[t] - mean over k of log p[k])`.
    LabelSmoothing,
    /// The squared log-sum-exp, times its weight.
    ZLoss,
    /// The objectives of the tokens that multi-token prediction predicts at each token, times their weight.
    FurtherTokens,
}

/// The losses of tokens, `[batch, seq]` each, the same on every rank of the tensor axis.
///
/// Training minimises the objective; the cross-entropy is reported as the loss, so that runs with
/// different terms can be compared.
#[derive(Clone, Debug)]
pub struct Losses {
    /// The sum of the cross-entropy and all terms; the backward starts here.
    pub objective: Tensor<2>,
    /// The cross-entropy and then the terms, in the order that the model
    /// [lists](crate::model::LanguageModel::loss_terms) them, without autodiff. Empty if the objective is
    /// the cross-entropy alone.
    pub parts: Vec<Tensor<2>>,
}

/// The losses `[tokens]`, or their sum `[1]` if their factor is known, and the parts.
pub(super) type TokenLosses = (Tensor<1>, Vec<Tensor<2>>);

/// The sums of losses over tokens.
#[derive(Clone, Debug)]
pub struct SummedLosses {
    /// The sum of the objective, `[1]`; the backward starts here.
    pub objective: Tensor<1>,
    /// The sum of each part, `[parts]`, without autodiff; none if there are no parts.
    pub parts: Option<Tensor<1>>,
}

impl Losses {
    /// From the objective of each token, `[batch * seq]`, and the parts.
    pub(super) fn of_tokens((objective, parts): TokenLosses, shape: [usize; 2]) -> Self {
        Self {
            objective: objective.reshape(shape),
            parts,
        }
    }

    /// The sums over the tokens.
    pub fn sums(self) -> SummedLosses {
        SummedLosses::new(self.objective.sum(), &self.parts)
    }
}

impl SummedLosses {
    /// With the sums of these parts.
    pub(super) fn new(objective: Tensor<1>, parts: &[Tensor<2>]) -> Self {
        let sums = parts.iter().map(|part| part.clone().sum());
        let parts = (!parts.is_empty()).then(|| Tensor::cat(sums.collect(), 0));
        Self { objective, parts }
    }
}

/// The losses of an objective that is the cross-entropy alone.
impl From<Tensor<2>> for Losses {
    fn from(objective: Tensor<2>) -> Self {
        let parts = vec![];
        Self { objective, parts }
    }
}
