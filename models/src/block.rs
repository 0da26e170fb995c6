//! A transformer block: a mixer and a feed-forward part. Each part normalizes the residual stream, and adds its output
//! to the stream.

use burn::module::Module;
use burn_megatron::kernels::rope::RopeTable;
use burn_megatron::nn::moe::MoeForward;
use burn_megatron::nn::{
    ActivationLayout, AttentionContext, BuildError, Dropout, ModelBuilder, Norm, Residual,
};

use crate::part::Part;
use crate::{FeedForward, LayerSpec, Mixer, MixerInput, PartOutput, StandardMixer};

/// A pre-norm transformer block with a mixer of type `X` (for example attention) and a feed-forward part.
#[derive(Module, Debug)]
pub struct Block<X: Mixer = StandardMixer> {
    attention_norm: Norm,
    /// The mixer. Its parameter path is the [name](Mixer::name) of the mixer, `attention` or `mla`.
    mixer: Part<X>,
    /// The norm of the output of the mixer, if any.
    attention_post_norm: Option<Norm>,
    attention_dropout: Dropout,
    mlp_norm: Norm,
    /// The feed-forward part. Its parameter path is `mlp` or `moe`.
    feed_forward: Part<FeedForward>,
    /// The norm of the output of the feed-forward part, if any.
    mlp_post_norm: Option<Norm>,
    mlp_dropout: Dropout,
    /// The number of previous tokens that a token attends to, or `None` if it attends to all previous tokens.
    #[module(skip)]
    window: Option<usize>,
}

impl<X: Mixer> Block<X> {
    pub(crate) fn new(
        spec: &LayerSpec<X::Spec>,
        builder: &ModelBuilder,
    ) -> Result<Self, BuildError> {
        let LayerSpec {
            mixer,
            feed_forward,
            norm,
            ..
        } = spec;
        let post_norm = |name| {
            let has_norm = spec.post_norms;
            has_norm.then(|| norm.init(&builder.child(name)))
        };
        let dropout = |name| Dropout::new(spec.dropout, &builder.child(name));
        let (mixer_name, feed_forward_name) = (X::name(mixer), FeedForward::name(feed_forward));
        Ok(Self {
            attention_norm: X::init_norm(mixer, norm, &builder.child("attention_norm"))?,
            mixer: Part {
                field: "mixer",
                name: mixer_name,
                module: X::init(mixer, &builder.child(mixer_name))?,
            },
            attention_post_norm: post_norm("attention_post_norm"),
            attention_dropout: dropout("attention_dropout")?,
            mlp_norm: norm.init_for_linear(&builder.child("mlp_norm"))?,
            feed_forward: Part {
                field: "feed_forward",
                name: feed_forward_name,
                module: FeedForward::init(feed_forward, &builder.child(feed_forward_name))?,
            },
            mlp_post_norm: post_norm("mlp_post_norm"),
            mlp_dropout: dropout("mlp_dropout")?,
            window: X::window(mixer).map(|tokens| tokens.saturating_sub(1)),
        })
    }

    /// Runs the mixer and the feed-forward part, and adds their outputs to the residual stream `x`. The last addition
    /// is deferred: the next norm computes it. `layout` describes how the stream is split over the ranks. `context`
    /// selects the tokens that each token attends to. `experts` is the additional input of expert layers.
    ///
    /// # Panics
    ///
    /// See [`Mixer::forward`].
    pub fn forward(
        &self,
        x: Residual,
        rotary: Option<&RopeTable>,
        layout: ActivationLayout,
        context: AttentionContext<'_>,
        experts: MoeForward<'_>,
    ) -> Residual {
        let input = MixerInput { rotary, context };
        let (mixed, x) = self.mixer.module.forward(&self.attention_norm, x, input);
        let (mixed, bias) = normalised(&self.attention_post_norm, mixed);
        let x = self.attention_dropout.forward_add(mixed, bias, x, layout);
        let (fed, x) = self.feed_forward.module.forward(&self.mlp_norm, x, experts);
        let (fed, bias) = normalised(&self.mlp_post_norm, fed);
        self.mlp_dropout.forward_add(fed, bias, x, layout)
    }

    /// Returns the number of previous tokens that a token attends to, if the mixer has a window.
    pub(crate) fn window(&self) -> Option<usize> {
        self.window
    }
}

/// Returns the output of a part with its bias, normalized if there is a norm.
fn normalised(norm: &Option<Norm>, output: PartOutput) -> PartOutput {
    let Some(norm) = norm else {
        return output;
    };
    let x = match output {
        (x, Some(bias)) => x + bias.into_tensor().unsqueeze(),
        (x, None) => x,
    };
    (norm.forward(x), None)
}
