//! The losses of tokens, and what they are made of.

use burn::tensor::Tensor;

/// A term that training minimises beside the cross-entropy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossTerm {
    /// What label smoothing adds: `s (log p[t] - mean over k of log p[k])`.
    LabelSmoothing,
    /// The squared log-sum-exp, times its weight.
    ZLoss,
}

/// The losses of tokens, `[batch, seq]` each, the same on every rank of the tensor axis.
///
/// Training minimises the objective; what is reported as the loss is the cross-entropy, so that runs
/// with other terms can be compared.
#[derive(Clone, Debug)]
pub struct Losses {
    /// The sum of the cross-entropy and all terms: what is differentiated.
    pub objective: Tensor<2>,
    /// The cross-entropy and then the terms, in the order that the model
    /// [names](crate::train::LanguageModel::loss_terms) them, without autodiff. Nothing where the
    /// objective is the cross-entropy alone.
    pub parts: Vec<Tensor<2>>,
}

impl Losses {
    /// The sum of each of the parts over the tokens: `[parts]`. Nothing where there are none.
    pub fn sums_of_parts(&self) -> Option<Tensor<1>> {
        let sums = self.parts.iter().map(|part| part.clone().sum());
        (!self.parts.is_empty()).then(|| Tensor::cat(sums.collect(), 0))
    }
}

/// Of an objective that is the cross-entropy alone.
impl From<Tensor<2>> for Losses {
    fn from(objective: Tensor<2>) -> Self {
        let parts = vec![];
        Self { objective, parts }
    }
}
