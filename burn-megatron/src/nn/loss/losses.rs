//! The losses of tokens, and the terms of the training objective.

use burn::tensor::Tensor;

/// A term that is added to the cross-entropy in the training objective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTerm {
    /// The label smoothing term: `s (log p[t] - mean over k of log p[k])`. See
    /// [`VocabParallelCrossEntropy`](super::VocabParallelCrossEntropy) for the symbols.
    LabelSmoothing,
    /// The z-loss: the squared log-sum-exp of the logits, multiplied by the weight of the z-loss.
    ZLoss,
    /// The multi-token prediction loss: the objectives of the additional predicted tokens, multiplied by their weight.
    FurtherTokens,
}

/// The losses of tokens, each `[batch, seq]`. They are the same on every rank of the tensor axis.
///
/// Training minimizes the objective, which is the cross-entropy plus all terms. The cross-entropy is reported as the
/// loss, so that runs with different terms can be compared.
#[derive(Clone, Debug)]
pub struct Losses {
    /// The sum of the cross-entropy and all terms. Call `backward` on this tensor.
    pub objective: Tensor<2>,
    /// The cross-entropy, followed by each term in the order of
    /// [`loss_terms`](crate::model::LanguageModel::loss_terms). These tensors are not tracked by autodiff. Empty if the
    /// objective is only the cross-entropy.
    pub parts: Vec<Tensor<2>>,
}

/// The losses `[tokens]` and their parts. If the factor of the loss is known, the sum `[1]` replaces the losses.
pub(super) type TokenLosses = (Tensor<1>, Vec<Tensor<2>>);

/// The sums of losses over tokens.
#[derive(Clone, Debug)]
pub struct SummedLosses {
    /// The sum of the objective over the tokens, `[1]`. Call `backward` on this tensor.
    pub objective: Tensor<1>,
    /// The sum of each of the [`parts`](Losses::parts) over the tokens, `[parts]`, not tracked by autodiff. `None` if
    /// there are no parts.
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

    /// Returns the sums of the objective and of each part over the tokens.
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
