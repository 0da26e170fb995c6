//! The mixer of a block: the part that mixes the tokens of a sequence.

use std::fmt::Debug;

use burn::module::{Module, ModuleDisplay};
use burn::tensor::Tensor;
use burn_megatron::kernels::rope::RopeTable;
use burn_megatron::model::GenerationCache;
use burn_megatron::nn::{
    AttentionContext, BuildError, KvCache, ModelBuilder, MultiLatentAttention, Norm, NormConfig,
    ParallelAttention, Residual,
};

use crate::{MixerSpec, PartOutput, Transformer, module_enum};

/// The input of a mixer, in addition to the residual stream.
#[derive(Debug)]
pub struct MixerInput<'a> {
    /// The table of rotary positions, if the model has them.
    pub rotary: Option<&'a RopeTable>,
    /// The earlier tokens that belong to the sequence of a token.
    pub context: AttentionContext<'a>,
}

/// The FLOPs per token in a part of a layer, over all ranks. [`burn_megatron_plan::flops`] defines what is counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerFlops {
    /// The number of weights of the matrix products.
    pub weights: u64,
    /// The FLOPs of forward and backward other than products with weights, such as attention.
    pub others: f64,
}

/// The part of a [`Block`](crate::Block) that mixes the tokens of a sequence. A model with several kinds of mixers has
/// an enum of mixers, for which [`module_enum!`](crate::module_enum) implements `Module`.
///
/// Under sequence parallelism, each tensor rank holds a part of the sequence of the residual stream. The column- and
/// row-parallel layers gather and scatter it.
pub trait Mixer: Module + ModuleDisplay + Sync + 'static {
    /// The specification of a mixer: plain data.
    type Spec: Clone + Debug + Send + Sync + 'static;

    /// The cache with which a [`Transformer`] with these mixers generates. Use [`KvCache`] if every mixer reads the
    /// layer's cache in [`AttentionContext::Cached`], and [`RecomputePrefix`](burn_megatron::model::RecomputePrefix)
    /// otherwise.
    type Cache: GenerationCache<Transformer<Self>>;

    /// Returns the name of the mixer in the paths of its parameters, such as `attention`.
    fn name(spec: &Self::Spec) -> &'static str;

    /// Returns the number of tokens that a token attends to, including the token. By default, it attends to all earlier
    /// tokens. Layers with a window have a different rotary table if the model has a `local_base`.
    fn window(_spec: &Self::Spec) -> Option<usize> {
        None
    }

    /// Returns the FLOPs per token in sequences of `seq` tokens.
    fn flops(spec: &Self::Spec, seq: usize) -> LayerFlops;

    /// Builds this rank's part of the mixer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the sizes do not fit each other or the ranks.
    fn init(spec: &Self::Spec, builder: &ModelBuilder) -> Result<Self, BuildError>;

    /// Builds the norm of the input. Override it with [`NormConfig::init_for_linear`] if a linear layer recomputes the
    /// norm in the backward.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the settings of recomputation do not fit the norm.
    fn init_norm(
        _spec: &Self::Spec,
        norm: &NormConfig,
        builder: &ModelBuilder,
    ) -> Result<Norm, BuildError> {
        Ok(norm.init(builder))
    }

    /// Returns the output for the normalized residual stream, and the sum of the stream, like [`Norm::forward_add`].
    fn forward(&self, norm: &Norm, x: Residual, input: MixerInput<'_>) -> (PartOutput, Tensor<3>);
}

/// The mixers of [`TransformerConfig`](crate::TransformerConfig).
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has one mixer for each layer"
)]
pub enum StandardMixer {
    /// Attention with keys and values per head or per group of heads.
    Attention(ParallelAttention),
    /// Multi-head latent attention.
    Latent(MultiLatentAttention),
}

module_enum!(StandardMixer { Attention, Latent });

impl Mixer for StandardMixer {
    type Spec = MixerSpec;
    type Cache = KvCache;

    fn name(spec: &MixerSpec) -> &'static str {
        match spec {
            MixerSpec::Attention(_) => "attention",
            MixerSpec::Latent(_) => "mla",
        }
    }

    fn window(spec: &MixerSpec) -> Option<usize> {
        match spec {
            MixerSpec::Attention(attention) => attention.window,
            MixerSpec::Latent(_) => None,
        }
    }

    fn flops(spec: &MixerSpec, seq: usize) -> LayerFlops {
        match spec {
            MixerSpec::Attention(attention) => LayerFlops::of_attention(attention, seq),
            MixerSpec::Latent(latent) => LayerFlops::of_latent(latent, seq),
        }
    }

    fn init(spec: &MixerSpec, builder: &ModelBuilder) -> Result<Self, BuildError> {
        Ok(match spec {
            MixerSpec::Attention(attention) => Self::Attention(attention.init(builder)?),
            MixerSpec::Latent(latent) => Self::Latent(latent.init(builder)?),
        })
    }

    fn init_norm(
        spec: &MixerSpec,
        norm: &NormConfig,
        builder: &ModelBuilder,
    ) -> Result<Norm, BuildError> {
        match spec {
            MixerSpec::Attention(_) => norm.init_for_linear(builder),
            MixerSpec::Latent(_) => Ok(norm.init(builder)),
        }
    }

    /// # Panics
    ///
    /// See [`ParallelAttention::forward_with_context`] and [`MultiLatentAttention::forward`].
    fn forward(&self, norm: &Norm, x: Residual, input: MixerInput<'_>) -> (PartOutput, Tensor<3>) {
        let MixerInput { rotary, context } = input;
        match self {
            Self::Attention(attention) => attention.forward_normalized(norm, x, rotary, context),
            Self::Latent(latent) => {
                let rotary = rotary.expect("latent attention has rotary positions");
                let (attended, stream) = latent.forward_normalized(norm, x, rotary, context);
                ((attended, None), stream)
            }
        }
    }
}
