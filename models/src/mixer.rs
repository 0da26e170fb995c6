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
    /// The table of rotary position embeddings, if the model uses them.
    pub rotary: Option<&'a RopeTable>,
    /// The context of attention: the previous tokens that each token may attend to.
    pub context: AttentionContext<'a>,
}

/// The FLOPs per token of a part of a layer, summed over all ranks. [`burn_megatron_plan::flops`] defines which
/// operations are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerFlops {
    /// The number of weights in matrix multiplications. Each weight adds 6 FLOPs per token.
    pub weights: u64,
    /// The FLOPs of all other operations of the forward and the backward, such as attention scores.
    pub others: f64,
}

/// The part of a [`Block`](crate::Block) that mixes the tokens of a sequence, such as attention. For a model with
/// several kinds of mixers, implement this trait for an enum. [`module_enum!`](crate::module_enum) implements `Module`
/// for the enum.
///
/// With sequence parallelism, the residual stream is split along the sequence over the tensor-parallel ranks. The
/// column-parallel layers of the mixer gather it, and the row-parallel layers scatter it.
pub trait Mixer: Module + ModuleDisplay + Sync + 'static {
    /// The specification from which a mixer is built.
    type Spec: Clone + Debug + Send + Sync + 'static;

    /// The cache that a [`Transformer`] with these mixers uses for text generation. Use [`KvCache`] if every mixer
    /// reads the KV cache from [`AttentionContext::Cached`], and
    /// [`RecomputePrefix`](burn_megatron::model::RecomputePrefix) otherwise.
    type Cache: GenerationCache<Transformer<Self>>;

    /// Returns the name that the paths of the mixer's parameters contain, such as `attention`.
    fn name(spec: &Self::Spec) -> &'static str;

    /// Returns the size of the sliding attention window in tokens, including the query token. The default
    /// implementation returns `None`: a token attends to all previous tokens. If the model sets `local_base`, layers
    /// with a window use a separate RoPE table.
    fn window(_spec: &Self::Spec) -> Option<usize> {
        None
    }

    /// Returns the FLOPs per token of the mixer, for sequences of `seq` tokens.
    fn flops(spec: &Self::Spec, seq: usize) -> LayerFlops;

    /// Builds this rank's part of the mixer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the sizes are inconsistent or cannot be split over the ranks.
    fn init(spec: &Self::Spec, builder: &ModelBuilder) -> Result<Self, BuildError>;

    /// Builds the norm at the input of the mixer. If a linear layer of the mixer recomputes the norm in the backward,
    /// implement this method with [`NormConfig::init_for_linear`].
    ///
    /// # Errors
    ///
    /// [`BuildError`] if the recomputation settings are not supported for this norm.
    fn init_norm(
        _spec: &Self::Spec,
        norm: &NormConfig,
        builder: &ModelBuilder,
    ) -> Result<Norm, BuildError> {
        Ok(norm.init(builder))
    }

    /// Normalizes the residual stream `x` with `norm` and computes the mixer. Returns the output of the mixer, and the
    /// residual stream with its pending addition completed, as in [`Norm::forward_add`].
    fn forward(&self, norm: &Norm, x: Residual, input: MixerInput<'_>) -> (PartOutput, Tensor<3>);
}

/// The mixers that a [`TransformerConfig`](crate::TransformerConfig) supports.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a model has one mixer for each layer"
)]
pub enum StandardMixer {
    /// Multi-head or grouped-query attention.
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
