//! The traits that a model implements so that it can be trained, verified and used for generation.
//!
//! - [`LanguageModel`]: the module of the model, with the forward of a pipeline stage.
//! - [`ModelConfig`]: the configuration of the model, from which every rank builds its part. The command line program
//!   reads it from `[model]` of a recipe.
//! - [`StageBuilder`] and [`StageLayers`]: the modules of the model on one rank of the pipeline.
//! - [`GenerationCache`]: the cache of previous tokens during generation.

mod cache;
mod config;
mod stages;
#[cfg(test)]
mod tests;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use crate::nn::{LossFactor, LossTerm, Losses, SummedLosses};

pub use crate::nn::Tokens;

pub use cache::{CachedAttention, GenerationCache, RecomputePrefix};
pub use config::{
    ConfigDifference, ModelConfig, RoundingSizes, check_context, check_without_experts,
    compare_settings,
};
pub use stages::{LayerNote, StageBuilder, StageLayers, StageRun, on_stage};

/// A decoder-only language model: the complete model, or the stages of one pipeline rank.
///
/// A model without pipeline parallelism has one stage, which has the number 0.
pub trait LanguageModel: Module + 'static {
    /// The type of the cache during generation: [`KvCache`](crate::nn::KvCache) for a model with [`CachedAttention`],
    /// or [`RecomputePrefix`] for any model.
    type Cache: GenerationCache<Self>;

    /// Runs the layers of a pipeline stage. The first stage reads `tokens`. The other stages read `input`, which is the
    /// output of the previous stage. Returns the hidden states (the residual stream), `[batch, seq, hidden]`. The last
    /// stage returns the input of [`losses_of`](Self::losses_of) and [`logits_of`](Self::logits_of). With
    /// [further](Tokens::further) tokens for multi-token prediction, the last stage appends the rows of each depth:
    /// `[batch (1 + depths), seq, hidden]`.
    ///
    /// # Panics
    ///
    /// Panics if the boundaries of the packed documents do not fit the rows of the tokens. See [`Tokens::format`].
    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3>;

    /// Returns a number that must divide the sequence length. With sequence parallelism it is the size of the tensor
    /// axis.
    fn sequence_multiple(&self) -> usize {
        1
    }

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the number of depths of multi-token prediction. Training and evaluation pass this number of
    /// [further](Tokens::further) tokens to the model. The targets of each depth are appended to the targets as
    /// additional rows.
    fn further_depths(&self) -> usize {
        0
    }

    /// Computes the loss of each token in nats from the output of the last stage. The losses are equal on all ranks of
    /// the tensor axis. `targets` has the shape `[batch, seq]`. The further tokens of multi-token prediction are not
    /// included.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses;

    /// Computes the sums of the [losses](Self::losses_of) over all tokens. A training step multiplies the sum of the
    /// objective by `factor` and runs the backward of the product.
    ///
    /// With multi-token prediction, the output of the last stage and the targets also contain the rows of each
    /// [depth](Self::further_depths): `[batch (1 + depths), seq]`. A model that overrides this method can compute
    /// gradients in the forward, like [`LinearCrossEntropy`](crate::nn::LinearCrossEntropy).
    fn loss_sums_of(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
        factor: &LossFactor,
    ) -> SummedLosses {
        let _ = factor;
        self.losses_of(hidden, targets).sums()
    }

    /// Returns the terms that are added to the cross-entropy in the objective, in the order of the
    /// [parts](Losses::parts) of the losses. The terms are the same on every rank.
    fn loss_terms(&self) -> &[LossTerm] {
        &[]
    }

    /// Computes the logits `[batch, seq, vocabulary]` from the output of the last stage. The logits are gathered on
    /// every rank of the tensor axis.
    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// Returns the path of the output layer's weight, or `None` if the gradient of this weight cannot be deferred
    /// ([`defer_embedding_wgrad`](crate::mesh::ParallelConfig::defer_embedding_wgrad)).
    fn output_weight(&self) -> Option<&str> {
        None
    }

    /// Returns the maximum sequence length, in tokens.
    fn context(&self) -> usize;

    /// Returns the number of floating-point operations (FLOPs) per token in forward and backward, summed over all
    /// ranks, for sequences of `seq` tokens. Each weight of a matmul counts six FLOPs. Each pair of query and key that
    /// the mask allows counts six FLOPs per feature of queries and values. `burn_megatron_plan::flops` has the
    /// formulas.
    fn flops_per_token(&self, seq: usize) -> f64;

    /// Computes the objective of each token, for a model with one pipeline stage.
    fn losses(&self, tokens: impl Into<Tokens>, targets: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.hidden(0, None, tokens.into());
        self.losses_of(hidden, targets).objective
    }

    /// Computes the logits of the next tokens, for a model with one pipeline stage.
    fn logits(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        self.logits_of(self.hidden(0, None, tokens.into()))
    }
}
