//! What the training loop needs of a model.

use burn::module::Module;
use burn::tensor::{Int, Tensor};

/// A decoder that predicts the next token.
pub trait LanguageModel: Module {
    /// The loss of each token in nats, the same on every rank of the tensor axis.
    ///
    /// `tokens` and `targets` are `[batch, seq]`. `offset` (`[batch, seq, hidden]`), if any, is
    /// added to the input after embedding; its gradient is the gradient of the input.
    fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
        offset: Option<Tensor<3>>,
    ) -> Tensor<2>;

    /// The logits `[batch, seq, vocabulary]` of the next tokens, whole on every rank.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;

    /// The longest sequence.
    fn context(&self) -> usize;

    /// Floating-point operations of forward and backward per token, for sequences of `seq` tokens,
    /// over all ranks: six for each weight that is multiplied, and `12 layers seq heads width` for
    /// the attention products (Narayanan et al. 2021, arXiv:2104.04473; the causal half is not
    /// taken off).
    fn flops_per_token(&self, seq: usize) -> f64;
}
