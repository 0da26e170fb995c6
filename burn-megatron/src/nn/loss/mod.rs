//! Cross entropy over logits that are split along the vocabulary.

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Int, Tensor};
use burn_megatron_kernels::cross_entropy::{CrossEntropyOptions, Part};

use super::{Place, Vocabulary};
use crate::collective::Comm;

mod fused;
mod losses;
mod unfused;

pub use losses::{LossTerm, Losses};

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
///
/// [`losses`](Self::losses) gives the cross-entropy `-log p[t]` and the [terms](Self::terms) beside their
/// sum, from the log-sum-exp and the target's logit that the loss has anyway: logits are not read again.
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

    /// What the loss has beside the cross-entropy.
    pub fn terms(&self) -> &'static [LossTerm] {
        match (self.smooths(), self.options.z_loss != 0.0) {
            (false, false) => &[],
            (true, false) => &[LossTerm::LabelSmoothing],
            (false, true) => &[LossTerm::ZLoss],
            (true, true) => &[LossTerm::LabelSmoothing, LossTerm::ZLoss],
        }
    }

    /// A vocabulary of one token has nothing to smooth.
    fn smooths(&self) -> bool {
        self.options.label_smoothing != 0.0 && self.vocabulary.tokens > 1
    }

    /// This rank's logits `[batch, seq, padded vocabulary / tensor]` and the targets
    /// `[batch, seq]` to the loss of each token `[batch, seq]`, the same on every rank.
    pub fn forward(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
        self.losses(logits, targets).objective
    }

    /// The same, and what it is made of.
    pub fn losses(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let [batch, seq, width] = logits.dims();
        let targets = targets
            .reshape([batch * seq])
            .to_device(&logits.device().inner());
        let targets = if targets.is_autodiff() {
            targets.inner()
        } else {
            targets
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
        let pieces = (!self.terms().is_empty()).then(Aside::default);
        let loss = if self.fused {
            fused::cross_entropy
        } else {
            unfused::cross_entropy
        };
        let options = &self.options;
        let loss = loss(logits, targets, part, options, &self.comm, pieces.clone());
        let pieces = pieces.and_then(|pieces| pieces.take());
        let parts = pieces.map(|pieces| self.parts(&loss, pieces));
        let whole = |loss: Tensor<1>| loss.reshape([batch, seq]);
        Losses {
            objective: whole(loss),
            parts: parts.into_iter().flatten().map(whole).collect(),
        }
    }

    /// The cross-entropy and the terms of a loss, `[tokens]` each. What smoothing adds is what is left.
    fn parts(&self, loss: &Tensor<1>, pieces: Pieces) -> Vec<Tensor<1>> {
        let Pieces { plain, z_loss } = pieces;
        let loss = if loss.is_autodiff() {
            loss.clone().inner()
        } else {
            loss.clone()
        };
        let smoothing = self.smooths().then(|| {
            let rest = loss - plain.clone();
            z_loss.clone().map_or(rest.clone(), |z_loss| rest - z_loss)
        });
        let terms = smoothing.into_iter().chain(z_loss);
        std::iter::once(plain).chain(terms).collect()
    }
}

/// What a loss is made of, `[tokens]` each, without autodiff.
#[derive(Debug)]
struct Pieces {
    /// The cross-entropy alone.
    plain: Tensor<1>,
    /// The z-loss, times its weight, where there is one.
    z_loss: Option<Tensor<1>>,
}

/// Where a function, which has one output, leaves the pieces of it.
#[derive(Clone, Debug, Default)]
struct Aside(Arc<Mutex<Option<Pieces>>>);

impl Aside {
    fn put(&self, pieces: Pieces) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(pieces);
    }

    fn take(&self) -> Option<Pieces> {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.take()
    }
}
