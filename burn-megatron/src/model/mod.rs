//! The traits that a model implements to be trained, verified and sampled from.
//!
//! - [`LanguageModel`]: the module, with its forward through a pipeline stage.
//! - [`ModelConfig`]: its configuration, from which every rank builds its part of the model. A command line
//!   reads it from `[model]` of a recipe.
//! - [`StageBuilder`] and [`StageLayers`]: the modules on one rank of the pipeline.
//! - [`GenerationCache`]: the cache of past tokens during generation.

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

/// A decoder that predicts the next token: a complete model, or the stages of one pipeline rank.
///
/// A model without pipeline parallelism has one stage, number 0.
pub trait LanguageModel: Module + 'static {
    /// The cache of past tokens during generation: [`KvCache`](crate::nn::KvCache) for a model with
    /// [`CachedAttention`], or [`RecomputePrefix`] for any model.
    type Cache: GenerationCache<Self>;

    /// Runs the layers of a stage on `tokens` (first stage) or on the output `input` of the previous stage.
    /// Returns the residual stream `[batch, seq, hidden]`. The last stage returns the input of
    /// [`losses_of`](Self::losses_of) and [`logits_of`](Self::logits_of). With [further](Tokens::further)
    /// tokens the last stage appends the rows of each depth: `[batch (1 + depths), seq, hidden]`.
    ///
    /// # Panics
    ///
    /// If the documents of the tokens do not match their rows: see [`Tokens::format`].
    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3>;

    /// Returns the number that must divide the sequence length: the size of the tensor axis under sequence
    /// parallelism.
    fn sequence_multiple(&self) -> usize {
        1
    }

    /// Returns the vocabulary size.
    fn vocabulary(&self) -> usize;

    /// Returns the number of depths of multi-token prediction. Training and evaluation pass this number of
    /// [further](Tokens::further) tokens to the model, and the targets of each depth as further rows.
    fn further_depths(&self) -> usize {
        0
    }

    /// Returns the loss of each token in nats, from the output of the last stage. It is the same on every rank
    /// of the tensor axis. `targets` have the shape `[batch, seq]`. Further tokens are not included.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses;

    /// Returns the sums of the [losses](Self::losses_of) over the tokens. A training step runs its backward
    /// from the sum of the objective times `factor`.
    ///
    /// With [depths](Self::further_depths), the output of the last stage and the targets contain the rows of
    /// each depth: `[batch (1 + depths), seq]`. A model that overrides this function can compute gradients in
    /// the forward, as [`LinearCrossEntropy`](crate::nn::LinearCrossEntropy) does.
    fn loss_sums_of(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
        factor: &LossFactor,
    ) -> SummedLosses {
        let _ = factor;
        self.losses_of(hidden, targets).sums()
    }

    /// Returns the terms of the objective in addition to the cross-entropy, in the order of the
    /// [parts](Losses::parts) of the losses. They are the same on every rank.
    fn loss_terms(&self) -> &[LossTerm] {
        &[]
    }

    /// Returns the logits `[batch, seq, vocabulary]` from the output of the last stage, gathered on every rank
    /// of the tensor axis.
    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// Returns the path of the weight of the output layer, if its gradient can be deferred
    /// ([`defer_embedding_wgrad`](crate::mesh::ParallelConfig::defer_embedding_wgrad)).
    fn output_weight(&self) -> Option<&str> {
        None
    }

    /// Returns the maximum sequence length, in tokens.
    fn context(&self) -> usize;

    /// Returns the floating-point operations of forward and backward per token, for sequences of `seq` tokens,
    /// over all ranks. Each weight of a matrix product counts six operations. Each pair of query and key that
    /// the mask allows counts six operations per feature of queries and values. `burn_megatron_plan::flops` has
    /// the formulas.
    fn flops_per_token(&self, seq: usize) -> f64;

    /// Returns the objective of each token, for a model with one stage.
    fn losses(&self, tokens: impl Into<Tokens>, targets: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.hidden(0, None, tokens.into());
        self.losses_of(hidden, targets).objective
    }

    /// Returns the logits of the next tokens, for a model with one stage.
    fn logits(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        self.logits_of(self.hidden(0, None, tokens.into()))
    }
}
