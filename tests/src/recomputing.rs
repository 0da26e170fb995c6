//! A transformer that generates without its own cache.

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use burn_megatron::model::RecomputePrefix;
use burn_megatron::model::{LanguageModel, Tokens};
use burn_megatron::nn::Losses;
use burn_megatron_models::Transformer;

/// A transformer without a cache of keys and values.
#[derive(Module, Debug)]
pub struct Recomputing {
    /// The transformer.
    pub inner: Transformer,
}

impl LanguageModel for Recomputing {
    type Cache = RecomputePrefix;

    fn hidden(&self, stage: usize, input: Option<Tensor<3>>, tokens: Tokens) -> Tensor<3> {
        self.inner.hidden(stage, input, tokens)
    }

    fn sequence_multiple(&self) -> usize {
        self.inner.sequence_multiple()
    }

    fn vocabulary(&self) -> usize {
        self.inner.vocabulary()
    }

    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses {
        self.inner.losses_of(hidden, targets)
    }

    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3> {
        self.inner.logits_of(hidden)
    }

    fn context(&self) -> usize {
        self.inner.context()
    }

    fn flops_per_token(&self, seq: usize) -> f64 {
        self.inner.flops_per_token(seq)
    }
}
