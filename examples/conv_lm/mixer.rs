//! A custom mixer: a gated causal convolution (Dauphin et al. 2017, arXiv:1612.08083). The tensor axis splits its channels.
//! Each layer of the model has either this convolution or attention.

use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{Int, Tensor};
use burn_megatron::mesh::Axis;
use burn_megatron::model::RecomputePrefix;
use burn_megatron::nn::{
    AttentionContext, BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Init,
    ModelBuilder, Norm, NormConfig, OutputSection, ParameterSpec, Placement, Residual,
    RowParallelLinear, RowParallelLinearConfig, anchored_value, recompute,
};
use burn_megatron_models::{
    LayerFlops, Mixer, MixerInput, MixerSpec, PartOutput, StandardMixer, module_enum,
};

/// The mixer of a layer.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a model has one for each layer")]
pub enum HybridMixer {
    Standard(StandardMixer),
    Conv(GatedConv),
}

module_enum!(HybridMixer { Standard, Conv });

/// The specification of the mixer of a layer.
#[derive(Clone, Debug)]
pub enum HybridSpec {
    Standard(MixerSpec),
    Conv(GatedConvConfig),
}

impl Mixer for HybridMixer {
    type Spec = HybridSpec;
    type Cache = RecomputePrefix;

    fn name(spec: &HybridSpec) -> &'static str {
        match spec {
            HybridSpec::Standard(spec) => StandardMixer::name(spec),
            HybridSpec::Conv(_) => "conv",
        }
    }

    fn window(spec: &HybridSpec) -> Option<usize> {
        match spec {
            HybridSpec::Standard(spec) => StandardMixer::window(spec),
            HybridSpec::Conv(_) => None,
        }
    }

    fn flops(spec: &HybridSpec, seq: usize) -> LayerFlops {
        match spec {
            HybridSpec::Standard(spec) => StandardMixer::flops(spec, seq),
            HybridSpec::Conv(GatedConvConfig { hidden, kernel }) => LayerFlops {
                weights: (hidden * (3 * hidden + kernel)) as u64,
                others: 0.0,
            },
        }
    }

    fn init(spec: &HybridSpec, builder: &ModelBuilder) -> Result<Self, BuildError> {
        Ok(match spec {
            HybridSpec::Standard(spec) => Self::Standard(StandardMixer::init(spec, builder)?),
            HybridSpec::Conv(config) => Self::Conv(config.init(builder)?),
        })
    }

    fn init_norm(
        spec: &HybridSpec,
        norm: &NormConfig,
        builder: &ModelBuilder,
    ) -> Result<Norm, BuildError> {
        match spec {
            HybridSpec::Standard(spec) => StandardMixer::init_norm(spec, norm, builder),
            HybridSpec::Conv(_) => Ok(norm.init(builder)),
        }
    }

    fn forward(&self, norm: &Norm, x: Residual, input: MixerInput<'_>) -> (PartOutput, Tensor<3>) {
        match self {
            Self::Standard(mixer) => mixer.forward(norm, x, input),
            Self::Conv(conv) => {
                let (normal, stream) = norm.forward_add(x);
                ((conv.forward(normal, &input.context), None), stream)
            }
        }
    }
}

/// Configuration of a [`GatedConv`].
#[derive(Clone, Debug)]
pub struct GatedConvConfig {
    /// Features of the residual stream, and channels.
    pub hidden: usize,
    /// The kernel size: the number of tokens in a convolution, including the current token.
    pub kernel: usize,
}

/// `(conv(value) * sigmoid(gate)) W`, where the value and the gate of each channel are projections of the input.
#[derive(Module, Debug)]
pub struct GatedConv {
    input: ColumnParallelLinear,
    /// This rank's part of `[kernel, hidden]`; the first row is the factor of the token itself.
    taps: Param<Tensor<2>>,
    output: RowParallelLinear,
}

impl GatedConvConfig {
    fn init(&self, builder: &ModelBuilder) -> Result<GatedConv, BuildError> {
        let Self { hidden, kernel } = *self;
        let ranks = builder.place().size;
        let channels = |name: &str| OutputSection::new(name.into(), hidden, 1);
        let input = ColumnParallelLinearConfig::new(hidden, 2 * hidden)
            .with_sections(vec![channels("value channels"), channels("gate channels")])
            .with_bias(false);
        let output = RowParallelLinearConfig::new(hidden, hidden).with_bias(false);
        let taps = ParameterSpec::new([kernel, hidden], Init::Uniform((kernel as f64).powf(-0.5)))
            .with_placement(Axis::Tensor, Placement::split(1, hidden, ranks));
        Ok(GatedConv {
            input: input.init(&builder.child("input"))?,
            taps: builder.parameter("taps", taps),
            output: output.init(&builder.child("output"))?,
        })
    }
}

impl GatedConv {
    /// Computes the mixer. The layers before and after the convolution gather and scatter the tokens of sequence
    /// parallelism.
    fn forward(&self, x: Tensor<3>, context: &AttentionContext<'_>) -> Tensor<3> {
        let positions = match context {
            AttentionContext::Rows => None,
            AttentionContext::Packed(packed) => Some(packed.positions().clone()),
            AttentionContext::Sharded(_) => unreachable!("the model refuses context parallelism"),
            AttentionContext::Cached(_) => unreachable!("RecomputePrefix reads whole texts"),
        };
        let projected = self.input.forward(x).chunk(2, 2);
        let [value, gate] = projected.try_into().expect("two halves");
        // Burn's multiplications save the taps for the backward. With recomputation they are freed after the forward,
        // so that ZeRO-3 holds the weights of only a few layers at once.
        let conv = self.clone();
        let mixed = recompute(value, move |value| conv.convolve(value, positions.as_ref()));
        self.output.forward(mixed * sigmoid(gate))
    }

    /// Computes the causal convolution of each channel. With `positions`, tokens do not see other documents.
    fn convolve(&self, x: Tensor<3>, positions: Option<&Tensor<2, Int>>) -> Tensor<3> {
        let taps = anchored_value(&self.taps, &x);
        let ([batch, seq, channels], [kernel, _]) = (x.dims(), taps.dims());
        let tap = |number| taps.clone().narrow(0, number, 1).unsqueeze();
        let mut sum = x.clone() * tap(0);
        for back in 1..kernel.min(seq) {
            // Zeros before the first token.
            let zeros = Tensor::zeros([batch, back, channels], (&x.device(), x.dtype()));
            let earlier = x.clone().narrow(1, 0, seq - back);
            let mut earlier = Tensor::cat(vec![zeros, earlier], 1);
            if let Some(positions) = positions {
                let outside = positions.clone().lower_elem(back as i64);
                let outside = outside.unsqueeze_dim::<3>(2);
                let outside = outside.expand([batch, seq, channels]);
                earlier = earlier.mask_fill(outside, 0.0);
            }
            sum = sum + earlier * tap(back);
        }
        sum
    }
}
