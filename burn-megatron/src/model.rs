//! What a language model is to those that train it and to those that draw text from it.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use crate::nn::{KvCache, LossTerm, Losses};

/// What a decoder reads.
#[derive(Clone, Debug)]
pub struct Tokens {
    /// `[batch, seq]`
    pub ids: Tensor<2, Int>,
    /// Where documents that see nothing of each other begin, in the rows laid end to end, and where the
    /// last one ends: `0, ..., batch * seq`. Nothing where every row is one piece.
    pub documents: Option<Arc<[i32]>>,
}

impl From<Tensor<2, Int>> for Tokens {
    fn from(ids: Tensor<2, Int>) -> Self {
        Self {
            ids,
            documents: None,
        }
    }
}

/// A decoder that predicts the next token: the whole, or the stages of one pipeline rank.
///
/// A model that is not cut has one stage, number 0.
pub trait LanguageModel: Module {
    /// Runs the layers of a stage: `tokens` on the first one, on the others the
    /// `input` that the stage before gave, to the residual stream `[batch, seq, hidden]`.
    ///
    /// `offset` (`[batch, seq, hidden]`), if any, is added to the input after embedding; its
    /// gradient is the gradient of the input.
    ///
    /// # Panics
    ///
    /// When the documents of the tokens do not fit their rows: see
    /// [`Packed::new`](crate::nn::Packed::new).
    fn hidden(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        tokens: Tokens,
        offset: Option<Tensor<3>>,
    ) -> Tensor<3>;

    /// Runs the layers of a stage on tokens `[sequences, new]` that follow those in the `cache`: what
    /// [`hidden`](Self::hidden) gives for them at the end of the whole sequences. The cache gets their
    /// keys and values; that they count is said by [`KvCache::keep`], when all stages of this rank are
    /// done. For generation: nothing is recorded for a backward.
    ///
    /// # Panics
    ///
    /// When the sequences become longer than the cache can hold.
    fn hidden_after(
        &self,
        stage: usize,
        input: Option<Tensor<3>>,
        ids: Tensor<2, Int>,
        cache: &mut KvCache,
    ) -> Tensor<3>;

    /// An empty cache for the stages of this rank.
    fn cache(&self) -> KvCache;

    /// The lengths of sequences are multiples of this: of the size of the tensor axis under sequence
    /// parallelism.
    fn sequence_multiple(&self) -> usize {
        1
    }

    /// The number of different tokens.
    fn vocabulary(&self) -> usize;

    /// The losses of each token in nats from what the last stage gave, the same on every rank of the
    /// tensor axis. `targets` are `[batch, seq]`.
    fn losses_of(&self, hidden: Tensor<3>, targets: Tensor<2, Int>) -> Losses;

    /// The terms that training minimises beside the cross-entropy, known on every rank: those of the
    /// [parts](Losses::parts) of the losses.
    fn loss_terms(&self) -> &[LossTerm] {
        &[]
    }

    /// The logits `[batch, seq, vocabulary]` from what the last stage gave, whole on every rank of
    /// the tensor axis.
    fn logits_of(&self, hidden: Tensor<3>) -> Tensor<3>;

    /// The path of the weight that makes the logits.
    fn output_weight(&self) -> &str;

    /// The longest sequence.
    fn context(&self) -> usize;

    /// Floating-point operations of forward and backward per token, for sequences of `seq` tokens,
    /// over all ranks: six for each weight that is multiplied, and `12 layers seq heads width` for
    /// the attention products (Narayanan et al. 2021, arXiv:2104.04473; the causal half is not
    /// taken off).
    fn flops_per_token(&self, seq: usize) -> f64;

    /// What training minimises for each token, of a model that is not cut.
    fn losses(
        &self,
        tokens: impl Into<Tokens>,
        targets: Tensor<2, Int>,
        offset: Option<Tensor<3>>,
    ) -> Tensor<2> {
        let hidden = self.hidden(0, None, tokens.into(), offset);
        self.losses_of(hidden, targets).objective
    }

    /// The logits of the next tokens, of a model that is not cut.
    fn logits(&self, tokens: impl Into<Tokens>) -> Tensor<3> {
        self.logits_of(self.hidden(0, None, tokens.into(), None))
    }
}
