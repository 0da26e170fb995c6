//! One block: attention and MLP, each on a normalised input and added to the residual stream.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron::nn::{
    BuildError, Dropout, Init, Lies, Norm, ParallelAttention, ParallelAttentionConfig, ParallelMlp,
    ParallelMlpConfig, RotaryTable, Scope,
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
        sequence_parallel: bool,
        scope: &Scope,
    ) -> Result<Self, BuildError> {
        let init = Init::Normal(config.init_std);
        let output_init = Init::Normal(config.init_std / (2.0 * config.layers as f64).sqrt());
        let attention = ParallelAttentionConfig {
            hidden: config.hidden,
            heads: config.heads,
            groups: config.groups(),
            head_width,
            bias: config.bias,
            dropout: config.attention_dropout,
            init,
            output_init,
            sequence_parallel,
        };
        let mlp = ParallelMlpConfig {
            hidden: config.hidden,
            width: config.mlp_width(),
            activation: config.activation,
            bias: config.bias,
            init,
            output_init,
            sequence_parallel,
        };
        let norm = |name| {
            let (hidden, epsilon) = (config.hidden, config.norm_epsilon);
            Norm::new(
                config.norm,
                hidden,
                epsilon,
                sequence_parallel,
                &scope.child(name),
            )
        };
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

    /// `[batch, seq, hidden]` to the same; `lies` says how the residual stream lies on the ranks.
    pub fn forward(&self, x: Tensor<3>, rotary: Option<&RotaryTable>, lies: Lies) -> Tensor<3> {
        let attended = self
            .attention
            .forward(self.attention_norm.forward(x.clone()), rotary);
        let x = x + self.attention_dropout.forward(attended, lies);
        let fed = self.mlp.forward(self.mlp_norm.forward(x.clone()));
        x + self.mlp_dropout.forward(fed, lies)
    }
}
