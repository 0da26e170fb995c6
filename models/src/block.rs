//! A transformer block: attention and MLP or experts, each on a normalized input and added to the residual stream.

use burn::module::Module;
use burn::tensor::Tensor;
use burn_megatron::kernels::rope::RopeTable;
use burn_megatron::nn::moe::{MoeForward, MoeMlp};
use burn_megatron::nn::{
    ActivationLayout, AttentionContext, Bias, BuildError, Dropout, Init, ModelBuilder,
    MultiLatentAttention, Norm, ParallelAttention, ParallelAttentionConfig, ParallelMlp,
    ParallelMlpConfig, Residual,
};

use crate::TransformerConfig;

/// A pre-norm transformer block.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: Norm,
    /// Without latent attention.
    attention: Option<ParallelAttention>,
    mla: Option<MultiLatentAttention>,
    /// The norm of the output of attention.
    attention_post_norm: Option<Norm>,
    attention_dropout: Dropout,
    mlp_norm: Norm,
    /// Without experts.
    mlp: Option<ParallelMlp>,
    moe: Option<MoeMlp>,
    /// The norm of the output of the MLP or the experts.
    mlp_post_norm: Option<Norm>,
    mlp_dropout: Dropout,
    /// The number of tokens before its own that a token sees; `None` is all. None: all.
    #[module(skip)]
    window: Option<usize>,
}

impl Block {
    pub(crate) fn new(
        config: &TransformerConfig,
        number: usize,
        head_width: usize,
        scope: &ModelBuilder,
    ) -> Result<Self, BuildError> {
        let init = Init::Normal(config.init_std);
        let scaled = (2.0 * config.layers as f64).sqrt();
        let output_init = Init::Normal(match config.scaled_output_init {
            true => config.init_std / scaled,
            false => config.init_std,
        });
        let hidden = config.hidden;
        let attention =
            ParallelAttentionConfig::new(hidden, config.heads, config.groups(), head_width)
                .with_bias(config.has_output_bias())
                .with_qkv_bias(config.has_qkv_bias())
                .with_qk_norm(config.qk_norm())
                .with_window(config.window_of(number))
                .with_sinks(config.sinks)
                .with_scale(config.attention_scale)
                .with_soft_cap(config.attention_soft_cap)
                .with_dropout(config.attention_dropout)
                .with_sequence(config.context)
                .with_init(init)
                .with_output_init(output_init);
        let mlp = ParallelMlpConfig::new(hidden, config.mlp_width(), config.activation)
            .with_bias(config.bias)
            .with_init(init)
            .with_output_init(output_init);
        let moe = config.moe.as_ref().filter(|moe| moe.is_in(number));
        let moe = moe.map(|moe| moe.layer(config));
        let moe = moe.map(|moe| moe.with_init(init).with_output_init(output_init));
        let mla = config.mla.as_ref().map(|mla| mla.layer(config));
        let mla = mla.map(|mla| mla.with_init(init).with_output_init(output_init));
        let norm = config.norm();
        let post_norm = |name| {
            let has_norm = config.post_norms;
            has_norm.then(|| norm.init(&scope.child(name)))
        };
        let attention_norm = scope.child("attention_norm");
        let dropout = |name| Dropout::new(config.dropout, &scope.child(name));
        Ok(Self {
            attention_norm: match &mla {
                None => norm.init_for_linear(&attention_norm)?,
                Some(_) => norm.init(&attention_norm),
            },
            attention: match &mla {
                None => Some(attention.init(&scope.child("attention"))?),
                Some(_) => None,
            },
            mla: match mla {
                Some(mla) => Some(mla.init(&scope.child("mla"))?),
                None => None,
            },
            attention_post_norm: post_norm("attention_post_norm"),
            attention_dropout: dropout("attention_dropout")?,
            mlp_norm: norm.init_for_linear(&scope.child("mlp_norm"))?,
            mlp: match &moe {
                None => Some(mlp.init(&scope.child("mlp"))?),
                Some(_) => None,
            },
            moe: match moe {
                Some(moe) => Some(moe.init(&scope.child("moe"))?),
                None => None,
            },
            mlp_post_norm: post_norm("mlp_post_norm"),
            mlp_dropout: dropout("mlp_dropout")?,
            window: config
                .window_of(number)
                .map(|tokens| tokens.saturating_sub(1)),
        })
    }

    /// Adds both branches to the residual stream, the last addition left to the norm that follows. `layout` is
    /// the layout of the stream over the ranks, `context` what each token attends to, `experts` what a layer of experts is given.
    ///
    /// # Panics
    ///
    /// As [`ParallelAttention::forward_with_context`] and [`MultiLatentAttention::forward`].
    pub fn forward(
        &self,
        x: Residual,
        rotary: Option<&RopeTable>,
        layout: ActivationLayout,
        context: AttentionContext<'_>,
        experts: MoeForward<'_>,
    ) -> Residual {
        let norm = &self.attention_norm;
        let ((attended, bias), x) = match (&self.attention, &self.mla, rotary) {
            (Some(attention), ..) => attention.forward_normalized(norm, x, rotary, context),
            (None, Some(mla), Some(rotary)) => {
                let (attended, x) = mla.forward_normalized(norm, x, rotary, context);
                ((attended, None), x)
            }
            _ => unreachable!("a block has attention, and latent attention rotary positions"),
        };
        let (attended, bias) = normalised(&self.attention_post_norm, (attended, bias));
        let x = self
            .attention_dropout
            .forward_add(attended, bias, x, layout);
        let ((fed, bias), x) = match (&self.mlp, &self.moe) {
            (_, Some(moe)) => {
                let (fed, x) = moe.forward_normalized(&self.mlp_norm, x, experts);
                ((fed, None), x)
            }
            (Some(mlp), None) => mlp.forward_normalized(&self.mlp_norm, x),
            (None, None) => unreachable!("a block has an MLP or experts"),
        };
        let (fed, bias) = normalised(&self.mlp_post_norm, (fed, bias));
        self.mlp_dropout.forward_add(fed, bias, x, layout)
    }

    /// Returns the number of tokens before its own that a token sees, if its attention has a window.
    pub(crate) fn window(&self) -> Option<usize> {
        self.window
    }
}

/// The output of a branch with its bias, normalised where there is a norm of it.
fn normalised(norm: &Option<Norm>, branch: (Tensor<3>, Option<Bias>)) -> (Tensor<3>, Option<Bias>) {
    let Some(norm) = norm else {
        return branch;
    };
    let x = match branch {
        (x, Some(bias)) => x + bias.into_tensor().unsqueeze(),
        (x, None) => x,
    };
    (norm.forward(x), None)
}
