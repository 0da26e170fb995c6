//! Cross entropy over logits that are split along the vocabulary.

use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::cross_entropy::{CrossEntropyOptions, Part};

use super::{Place, Vocabulary};
use crate::collective::Comm;

mod fused;
mod unfused;

/// Cross entropy per token, without ever gathering the logits.
///
/// With `K` the number of tokens of the vocabulary (padding not counted), `t` the target, `e` the
/// label smoothing and `s = e K / (K - 1)`:
///
/// ```text
/// loss = (1 - s) * -log p[t]  +  s * mean over k of -log p[k]  +  z * (log of the sum of e^logit)^2
/// ```
///
/// so that the target keeps `1 - e` and the others share `e`. Padded entries have no probability
/// and no gradient. The result does not depend on the number of ranks.
///
/// The fused form gathers four numbers per token and rank in one collective; it keeps the logits for
/// the backward, which writes their gradient over them.
///
/// A target that is no token and not to be ignored is a fault of the data: its loss and its
/// gradient are NaN, so that it cannot pass unseen. (An error would have to wait for the device.)
#[derive(Clone, Debug)]
pub struct VocabParallelCrossEntropy {
    comm: Comm,
    vocabulary: Vocabulary,
    options: CrossEntropyOptions,
    fused: bool,
}

impl VocabParallelCrossEntropy {
    /// A loss over the ranks of `comm`, without smoothing, that ignores no target; fused.
    pub fn new(vocabulary: Vocabulary, comm: &Comm) -> Self {
        Self {
            comm: comm.clone(),
            vocabulary,
            options: CrossEntropyOptions::default(),
            fused: true,
        }
    }

    /// Sets the label smoothing, in `[0, 1)`.
    pub fn with_label_smoothing(mut self, label_smoothing: f64) -> Self {
        self.options.label_smoothing = label_smoothing;
        self
    }

    /// Sets the weight of the squared log-sum-exp, which keeps logits from drifting (Chowdhery et
    /// al. 2022, section 5).
    pub fn with_z_loss(mut self, z_loss: f64) -> Self {
        self.options.z_loss = z_loss;
        self
    }

    /// Sets the target that has no loss.
    pub fn with_ignore(mut self, ignore: Option<i64>) -> Self {
        self.options.ignore = ignore;
        self
    }

    /// Says whether the fused form is used.
    pub fn with_fused(mut self, fused: bool) -> Self {
        self.fused = fused;
        self
    }

    /// This rank's logits `[batch, seq, padded vocabulary / tensor]` and the targets
    /// `[batch, seq]` to the loss of each token `[batch, seq]`, the same on every rank.
    pub fn forward(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
        let [batch, seq, width] = logits.dims();
        let targets = targets
            .reshape([batch * seq])
            .to_device(&logits.device().inner());
        let targets = match targets.is_autodiff() {
            true => targets.inner(),
            false => targets,
        };
        let logits = logits.reshape([batch * seq, width]);
        let place = Place {
            index: self.comm.rank(),
            size: self.comm.size(),
        };
        let part = Part {
            first: self.vocabulary.part(place).0,
            tokens: self.vocabulary.tokens,
        };
        let loss = match self.fused {
            true => fused::cross_entropy(logits, targets, part, &self.options, &self.comm),
            false => unfused::cross_entropy(logits, targets, part, &self.options, &self.comm),
        };
        loss.reshape([batch, seq])
    }
}
