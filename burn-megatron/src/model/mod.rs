//! The traits that a model implements to be trained, verified and sampled from.
//!
//! - [`LanguageModel`]: the module, with its forward through a pipeline stage.
//! - [`ModelConfig`]: its configuration, from which every rank builds its part of the model. This is a model
//!   family: a command line reads it from `[model]` of a recipe.
//! - [`StageBuilder`] and [`StageLayers`]: the modules that a rank of the pipeline has.
//! - [`GenerationCache`]: what is kept of the text while a model generates.

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

/// A decoder that predicts the next token: a whole model, or the stages of one pipeline rank.
///
/// A model without pipeline parallelism has one stage, number 0.
pub trait LanguageModel: Module + 'static {
    /// The cache that generation keeps of the text that it has read: [`KvCache`](crate::nn::KvCache) for a model with
    /// [`CachedAttention`], or [`RecomputePrefix`] for any model.
    type Cache: GenerationCache<Self>;

    /// Runs the layers of a stage, from `tokens` (first stage) or the `input` from the previous stage, to
    /// the residual stream `[batch, seq, hidden]`; on the last stage to what [`losses_of`](Self::losses_of) and
    /// [`logits_of`](Self::logits_of) take. With [further](Tokens::further) tokens the last stage appends the rows of each
    /// depth: `[batch (1 + depths), seq, hidden]`.
    ///
    /// # Panics
    ///
    /// If the documents of the tokens do not fit their rows: see [`Tokens::format`].
    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3>;

    /// Sequence lengths must be multiples of this: the size of the tensor axis under sequence
    /// parallelism.
    fn sequence_multiple(&self) -> usize {
        1
    }

    /// The vocabulary size.
    fn vocabulary(&self) -> usize;

    /// The depths of multi-token prediction: a training step and an evaluation give a model so many
    /// [further](Tokens::further) tokens, and the targets of each depth as further rows.
    fn further_depths(&self) -> usize {
        0
    }

    /// The loss of each token in nats from the output of the last stage, the same on every rank of the
    /// tensor axis. `targets` are `[batch, seq]`. Further tokens have no part in them.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses;

    /// The sums of the [losses](Self::losses_of) over the tokens, from which a training step runs its backward:
    /// that of the objective times `factor`. Of a model with [depths](Self::further_depths) the output of the last stage and
    /// the targets have the rows of each depth, `[batch (1 + depths), seq]`. A model that overrides it can compute gradients in the forward, as
    /// [`LinearCrossEntropy`](crate::nn::LinearCrossEntropy) does.
    fn loss_sums_of(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
        factor: &LossFactor,
    ) -> SummedLosses {
        let _ = factor;
        self.losses_of(hidden, targets).sums()
    }

    /// The terms of the objective in addition to the cross-entropy, in the order of the
    /// [parts](Losses::parts) of the losses; the same on every rank.
    fn loss_terms(&self) -> &[LossTerm] {
        &[]
    }

    /// The logits `[batch, seq, vocabulary]` from the output of the last stage, gathered on every rank of
    /// the tensor axis.
    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// The path of the output layer's weight, if its gradient can be deferred
    /// ([`defer_embedding_wgrad`](crate::mesh::ParallelConfig::defer_embedding_wgrad)).
    fn output_weight(&self) -> Option<&str> {
        None
    }

    /// The longest sequence.
    fn context(&self) -> usize;

    /// Floating-point operations of forward and backward per token, for sequences of `seq` tokens,
    /// over all ranks: six per weight of a matrix product, and six per pair of a query and a key that the mask
    /// allows, and per feature of queries and values. `burn_megatron_plan::flops` has the formulas.
    fn flops_per_token(&self, seq: usize) -> f64;

    /// The objective of each token, of a model with one stage.
    fn losses(&self, tokens: impl Into<Tokens>, targets: Tensor<2, Int>) -> Tensor<2> {
        let hidden = self.hidden(0, None, tokens.into());
        self.losses_of(hidden, targets).objective
    }

    /// The logits of the next tokens, of a model with one stage.
    fn logits(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        self.logits_of(self.hidden(0, None, tokens.into()))
    }
}
