//! Cross-entropy of logits that are split over the vocabulary.

use burn::tensor::{Device, Int, Tensor};
use burn_megatron_kernels::cross_entropy::{CrossEntropyOptions, VocabularyShard};

use super::{AxisRank, Vocabulary};
use crate::collective::Comm;

mod chunk_size;
mod components;
mod factor;
mod fused;
mod linear;
mod losses;
mod output_gradients;
mod unfused;

pub use chunk_size::LogitsShape;
pub use factor::LossFactor;
pub use linear::LinearCrossEntropy;
use losses::TokenLosses;
pub use losses::{LossTerm, Losses, SummedLosses};

use components::{ComponentsCell, LossComponents};
use fused::FusedLoss;

/// Cross-entropy loss per token, for logits that are split over the vocabulary dimension. The logits are never
/// gathered.
///
/// Let `K` be the number of tokens of the vocabulary (without padding), `t` the target, `e` the label smoothing, `z`
/// the weight of the z-loss, and `s = e K / (K - 1)`:
///
/// ```text
/// loss = (1 - s) * -log p[t]  +  s * mean over k of -log p[k]  +  z * (log of the sum of e^logit)^2
/// ```
///
/// The target therefore has the label probability `1 - e`, and the other tokens share the probability `e`. Padding
/// entries of the vocabulary have probability 0 and no gradient. The result does not depend on the number of ranks.
///
/// The fused loss all-gathers four numbers per token and rank. It saves the logits for the backward pass, which
/// overwrites the logits with their gradient. A [`LinearCrossEntropy`] overwrites the logits already in the forward
/// pass if the gradient of the losses is known.
///
/// A target is invalid if it is neither a token nor the ignored target. The loss and the gradient of an invalid target
/// are NaN. An error is not returned, because the check would have to synchronize with the device.
///
/// [`losses`](Self::losses) returns the sum of all terms, and also the cross-entropy `-log p[t]` and each of the other
/// [terms](Self::terms). These are computed from the log-sum-exp and the target logit, without reading the logits
/// again.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_megatron::nn::{VocabParallelCrossEntropy, Vocabulary};
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let losses = World::threads(2)?.run(|rank| {
///     let (groups, device) = (ParallelContext::new(&layout, &rank)?, Device::flex());
///     let vocabulary = Vocabulary { tokens: 8, padded: 8 };
///     let loss = VocabParallelCrossEntropy::new(vocabulary, groups.tensor());
///     // This rank has the logits of 4 of the 8 tokens.
///     let logits = Tensor::<3>::zeros([1, 2, 4], &device);
///     let targets = Tensor::<2, Int>::from_data([[0, 7]], &device);
///     Ok::<_, AnyError>(loss.forward(logits, targets).mean().into_scalar::<f32>())
/// })?;
/// assert!(losses.iter().all(|loss| (loss - 8f32.ln()).abs() < 1e-5));
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct VocabParallelCrossEntropy {
    comm: Comm,
    vocabulary: Vocabulary,
    options: CrossEntropyOptions,
    fused: bool,
}

impl VocabParallelCrossEntropy {
    /// Creates a fused loss over the ranks of `comm`, without label smoothing and without an ignored target.
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

    /// Sets the weight of the z-loss, which is the squared log-sum-exp of the logits. The z-loss prevents the logits
    /// from drifting away from 0 (Chowdhery et al. 2022, section 5).
    pub fn with_z_loss(mut self, z_loss: f64) -> Self {
        self.options.z_loss = z_loss;
        self
    }

    /// Sets the target value that is ignored, like PyTorch's `ignore_index`.
    pub fn with_ignore(mut self, ignore: Option<i64>) -> Self {
        self.options.ignore = ignore;
        self
    }

    /// Sets whether fused kernels compute the loss. The default is true.
    pub fn with_fused(mut self, fused: bool) -> Self {
        self.fused = fused;
        self
    }

    /// Returns the loss terms that are added to the cross-entropy.
    pub fn terms(&self) -> &'static [LossTerm] {
        match (self.has_smoothing(), self.options.z_loss != 0.0) {
            (false, false) => &[],
            (true, false) => &[LossTerm::LabelSmoothing],
            (false, true) => &[LossTerm::ZLoss],
            (true, true) => &[LossTerm::LabelSmoothing, LossTerm::ZLoss],
        }
    }

    /// Returns whether there is a smoothing term. A vocabulary of one token has no smoothing term.
    fn has_smoothing(&self) -> bool {
        self.options.label_smoothing != 0.0 && self.vocabulary.tokens > 1
    }

    /// Returns the loss of each token, `[batch, seq]`. `logits` are this rank's logits
    /// `[batch, seq, padded vocabulary / tensor]`, and `targets` is `[batch, seq]`. The result is the same on every
    /// rank.
    pub fn forward(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Tensor<2> {
        self.losses(logits, targets).objective
    }

    /// Returns the loss of each token, and the parts of this loss. See [`Losses`].
    pub fn losses(&self, logits: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        let shape = targets.dims();
        Losses::of_tokens(self.of_tokens(logits, targets, None), shape)
    }

    /// Returns the losses `[tokens]` and the parts of the losses. If `factor` is given, returns the sum `[1]` instead
    /// of the losses.
    fn of_tokens(
        &self,
        logits: Tensor<3>,
        targets: Tensor<2, Int>,
        factor: Option<LossFactor>,
    ) -> TokenLosses {
        let [batch, seq, width] = logits.dims();
        let targets = flat_targets(targets, &logits.device());
        let logits = logits.reshape([batch * seq, width]);
        let (loss, cell) = (self.rows_loss(), ComponentsCell::default());
        let objective = if self.fused {
            fused::cross_entropy(logits, targets, loss, cell.clone(), factor)
        } else {
            let losses = unfused::cross_entropy(logits, targets, loss, cell.clone());
            match factor {
                Some(_) => losses.sum(),
                None => losses,
            }
        };
        (objective, self.parts(&cell, [batch, seq]))
    }

    /// Returns the loss of rows of this rank's logits.
    fn rows_loss(&self) -> FusedLoss {
        let place = AxisRank {
            index: self.comm.rank(),
            size: self.comm.size(),
        };
        FusedLoss {
            part: VocabularyShard {
                first: self.vocabulary.part(place).0,
                tokens: self.vocabulary.tokens,
            },
            options: self.options.clone(),
            comm: self.comm.clone(),
            has_components: !self.terms().is_empty(),
        }
    }

    /// Returns the cross-entropy and the terms of a loss, if it has terms. The smoothing term is computed as the
    /// remainder.
    fn parts(&self, cell: &ComponentsCell, shape: [usize; 2]) -> Vec<Tensor<2>> {
        let Some(LossComponents {
            loss,
            plain,
            z_loss,
        }) = cell.take()
        else {
            return vec![];
        };
        let smoothing = self.has_smoothing().then(|| {
            let rest = loss - plain.clone();
            z_loss.clone().map_or(rest.clone(), |z_loss| rest - z_loss)
        });
        let parts = [Some(plain), smoothing, z_loss].into_iter().flatten();
        parts.map(|part| part.reshape(shape)).collect()
    }
}

/// Flattens targets `[batch, seq]` to `[batch * seq]` on `device`, without autodiff.
fn flat_targets(targets: Tensor<2, Int>, device: &Device) -> Tensor<1, Int> {
    let tokens = targets.shape().num_elements();
    let targets = targets.reshape([tokens]);
    targets.to_device(&device.clone().inner()).inner()
}
