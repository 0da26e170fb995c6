//! A transformer block: attention and MLP, each on a normalized input and added to the residual stream.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron::kernels::rope::RopeTable;
use burn_megatron::nn::{
    ActivationLayout, AttentionContext, BuildError, Dropout, Init, ModelBuilder, Norm,
    ParallelAttention, ParallelAttentionConfig, ParallelMlp, ParallelMlpConfig,
};

use crate::TransformerConfig;

/// A pre-norm transformer block.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: Norm,
    attention: ParallelAttention,
    attention_dropout: Dropout,
    mlp_norm: Norm,
    mlp: ParallelMlp,
    mlp_dropout: Dropout,
}

impl Block {
    pub(crate) fn new(
        config: &TransformerConfig,
        head_width: usize,
        scope: &ModelBuilder,
    ) -> Result<Self, BuildError> {
        let init = Init::Normal(config.init_std);
        let output_init = Init::Normal(config.init_std / (2.0 * config.layers as f64).sqrt());
        let hidden = config.hidden;
        let attention =
            ParallelAttentionConfig::new(hidden, config.heads, config.groups(), head_width)
                .with_bias(config.bias)
                .with_qkv_bias(config.qkv_bias.unwrap_or(config.bias))
                .with_qk_norm(config.qk_norm.then_some(config.norm_epsilon))
                .with_window(config.window)
                .with_dropout(config.attention_dropout)
                .with_init(init)
                .with_output_init(output_init);
        let mlp = ParallelMlpConfig::new(hidden, config.mlp_width(), config.activation)
            .with_bias(config.bias)
            .with_init(init)
            .with_output_init(output_init);
        let norm = config.norm();
        let norm = |name| norm.init(&scope.child(name));
        let dropout = |name| Dropout::new(config.dropout, &scope.child(name));
        Ok(Self {
            attention_norm: norm("attention_norm"),
            attention: attention.init(&scope.child("attention"))?,
            attention_dropout: dropout("attention_dropout")?,
            mlp_norm: norm("mlp_norm"),
            mlp: mlp.init(&scope.child("mlp"))?,
            mlp_dropout: dropout("mlp_dropout")?,
        })
    }

    /// `[batch, seq, hidden]` to the same. `layout` is the layout of the residual stream over the ranks, `context`
    /// what each token attends to.
    ///
    /// # Panics
    ///
    /// As [`ParallelAttention::forward_with_context`].
    pub fn forward(
        &self,
        x: Tensor<3>,
        rotary: Option<&RopeTable>,
        layout: ActivationLayout,
        context: AttentionContext<'_>,
    ) -> Tensor<3> {
        let normal = self.attention_norm.forward(x.clone());
        let (attended, bias) = self.attention.forward_without_bias(normal, rotary, context);
        // The residual addition is fused into the dropout if there is one, otherwise into the next norm.
        let (normal, x) = match (self.attention_dropout.is_on(), bias) {
            (false, None) => self.mlp_norm.forward_add(attended, x),
            (_, bias) => {
                let x = self
                    .attention_dropout
                    .forward_add(attended, bias, x, layout);
                (self.mlp_norm.forward(x.clone()), x)
            }
        };
        let (fed, bias) = self.mlp.forward_without_bias(normal);
        self.mlp_dropout.forward_add(fed, bias, x, layout)
    }
}
