//! The LoRA adapters of a linear layer, and their matmuls.

use burn::module::{LoraAdapter, Module};
use burn::tensor::Tensor;

use super::LoraTarget;
use crate::mesh::Axis;
use crate::nn::LinearKernels;
use crate::nn::forward_context::constant;
use crate::nn::input_layout::InputLayout;
use crate::nn::linear::{LinearOperands, linear};
use crate::nn::lora::AdaptedLayer;
use crate::nn::{
    ActivationLayout, BuildError, Dropout, Init, ModelBuilder, ParameterSpec, Placement,
    RecomputeModule, SEQUENCE_DIM, Section,
};

/// The LoRA adapters of a linear layer. A fused layer, such as the QKV projection, has one adapter per section. Each
/// field has the name of its target.
#[derive(Module, Debug)]
pub struct LoraAdapters {
    /// The adapter of the query projection.
    pub q_proj: Option<LoraAdapter>,
    /// The adapter of the key projection.
    pub k_proj: Option<LoraAdapter>,
    /// The adapter of the value projection.
    pub v_proj: Option<LoraAdapter>,
    /// The adapter of the output projection of attention.
    pub o_proj: Option<LoraAdapter>,
    /// The adapter of the gate projection of an MLP.
    pub gate_proj: Option<LoraAdapter>,
    /// The adapter of the up projection of an MLP.
    pub up_proj: Option<LoraAdapter>,
    /// The adapter of the down projection of an MLP.
    pub down_proj: Option<LoraAdapter>,
    dropout: Dropout,
    /// The layout of the input of the dropout.
    #[module(skip)]
    layout: ActivationLayout,
    /// The layout of `x A`.
    #[module(skip)]
    inner: InputLayout,
    /// The target and the number of features of each section of the layer on this rank.
    #[module(skip)]
    sections: Vec<(LoraTarget, usize)>,
    #[module(skip)]
    kernels: LinearKernels,
}

/// Builds the adapters of a column-parallel layer, or returns `None` if no section is a target of the settings.
/// `sections` has the target and the columns of each section. It is empty for a layer that cannot have adapters.
/// `builder` is the builder of the layer, and `inner` is the layout of the input of the factors `B`.
///
/// # Errors
///
/// [`BuildError`] if the dropout is invalid, or if the layer recomputes the input of the adapters.
pub(in crate::nn) fn column_adapters(
    builder: &ModelBuilder,
    input: usize,
    sections: &[(LoraTarget, Section)],
    inner: InputLayout,
) -> Result<Option<LoraAdapters>, BuildError> {
    let place = builder.place();
    let sequence_parallel = builder.sequence_parallel();
    let layout = if sequence_parallel {
        let dim = SEQUENCE_DIM;
        ActivationLayout::SplitAlong { dim, place }
    } else {
        ActivationLayout::Whole
    };
    let Some(mut adapters) = Factory::new(builder, input) else {
        return Ok(None);
    };
    let mut offset = 0;
    for (target, section) in sections {
        // Each rank multiplies its part of the sequence.
        let a =
            |spec: ParameterSpec<2>| spec.with_sum_over(sequence_parallel.then_some(Axis::Tensor));
        let b = |spec: ParameterSpec<2>| {
            let sections = vec![*section];
            spec.with_placement(Axis::Tensor, Placement::Split { dim: 1, sections })
        };
        adapters.add(*target, (offset, section.size), a, b);
        offset += section.size;
    }
    adapters.check_recompute(RecomputeModule::Norm)?;
    let local = |(target, section): &(LoraTarget, Section)| (*target, section.size / section.parts);
    adapters.finish(sections.iter().map(local).collect(), layout, inner)
}

/// Builds the adapter of a row-parallel layer, or returns `None` if it is not a target. `builder` is the builder of
/// the layer.
///
/// # Errors
///
/// [`BuildError`] if the dropout is invalid or cannot be drawn in the layout, or if the layer recomputes the input of
/// the adapter.
pub(in crate::nn) fn row_adapters(
    builder: &ModelBuilder,
    [input, output]: [usize; 2],
    target: Option<LoraTarget>,
) -> Result<Option<LoraAdapters>, BuildError> {
    let place = builder.place();
    let adapters = target.zip(Factory::new(builder, input));
    let Some((target, mut adapters)) = adapters else {
        return Ok(None);
    };
    let a = |spec: ParameterSpec<2>| {
        spec.with_placement(Axis::Tensor, Placement::split(0, input, place.size))
    };
    // Each rank multiplies its term of `x A`.
    let b = |spec: ParameterSpec<2>| spec.with_sum_over(Axis::Tensor);
    adapters.add(target, (0, output), a, b);
    if target == LoraTarget::Down {
        adapters.check_recompute(RecomputeModule::Activation)?;
    }
    let contexts = builder.groups().config().context;
    if adapters.has_any() && adapters.config.dropout > 0.0 && contexts > 1 && place.size > 1 {
        return Err(builder.error(format!(
                "lora.dropout = {} conflicts with tensor = {} and context = {contexts}: set lora.dropout = 0, tensor = \
                 1 or context = 1",
                adapters.config.dropout, place.size
            )));
    }
    let layout = match place.size {
        1 => ActivationLayout::Whole,
        _ => ActivationLayout::SplitAlong { dim: 2, place },
    };
    adapters.finish(vec![(target, output)], layout, InputLayout::Local)
}

/// Creates the adapters of a layer.
struct Factory<'a> {
    layer: &'a ModelBuilder,
    config: super::LoraConfig,
    input: usize,
    made: Vec<(LoraTarget, LoraAdapter)>,
}

impl<'a> Factory<'a> {
    /// Returns `None` for a model without adapters.
    fn new(layer: &'a ModelBuilder, input: usize) -> Option<Self> {
        layer.lora_config().map(|config| Self {
            layer,
            input,
            config,
            made: vec![],
        })
    }

    fn has_any(&self) -> bool {
        !self.made.is_empty()
    }

    /// Checks that the layer does not recompute the input of its adapters.
    fn check_recompute(&self, module: RecomputeModule) -> Result<(), BuildError> {
        let recompute = self.layer.recompute();
        if !self.has_any() || !recompute.config().modules.contains(&module) {
            return Ok(());
        }
        let name = module.name();
        Err(self.layer.error(format!(
            "recomputation of {name:?} conflicts with the adapters, which keep the input of the layer: remove {name:?} \
             from the recomputed modules, or set other lora.target_modules"
        )))
    }

    /// Adds the adapter of a section with these columns, if the section is a target of the settings.
    fn add(
        &mut self,
        target: LoraTarget,
        (offset, output): (usize, usize),
        a: impl Fn(ParameterSpec<2>) -> ParameterSpec<2>,
        b: impl Fn(ParameterSpec<2>) -> ParameterSpec<2>,
    ) {
        let config = &self.config;
        if !config.targets().contains(&target) {
            return;
        }
        let builder = self.layer.child("lora").child(target).trained();
        let (input, rank) = (self.input, config.rank);
        let bound = |features: usize| Init::Uniform(1.0 / (features as f64).sqrt());
        let of_b = if config.init_lora_weights {
            Init::Constant(0.0)
        } else {
            bound(rank)
        };
        let a = a(ParameterSpec::new([input, rank], bound(input)));
        let b = b(ParameterSpec::new([rank, output], of_b));
        let adapter = LoraAdapter {
            a: builder.parameter("a", a),
            b: builder.parameter("b", b),
            scale: config.scale(),
        };
        self.layer.add_adapted(AdaptedLayer {
            target,
            weight: self.layer.child("weight").path().into(),
            offset,
            size: [input, output],
            adapter: builder.path().into(),
        });
        self.made.push((target, adapter));
    }

    fn finish(
        &mut self,
        sections: Vec<(LoraTarget, usize)>,
        layout: ActivationLayout,
        inner: InputLayout,
    ) -> Result<Option<LoraAdapters>, BuildError> {
        if !self.has_any() {
            return Ok(None);
        }
        let mut take = |target| {
            let at = self.made.iter().position(|(made, _)| *made == target)?;
            Some(self.made.swap_remove(at).1)
        };
        Ok(Some(LoraAdapters {
            q_proj: take(LoraTarget::Q),
            k_proj: take(LoraTarget::K),
            v_proj: take(LoraTarget::V),
            o_proj: take(LoraTarget::O),
            gate_proj: take(LoraTarget::Gate),
            up_proj: take(LoraTarget::Up),
            down_proj: take(LoraTarget::Down),
            dropout: Dropout::new(self.config.dropout, &self.layer.child("lora"))?,
            layout,
            inner,
            sections,
            kernels: self.layer.linear_kernels(),
        }))
    }
}

impl LoraAdapters {
    /// Returns the adapter of a target, or `None` if the target has no adapter.
    pub fn get(&self, target: LoraTarget) -> Option<&LoraAdapter> {
        match target {
            LoraTarget::Q => self.q_proj.as_ref(),
            LoraTarget::K => self.k_proj.as_ref(),
            LoraTarget::V => self.v_proj.as_ref(),
            LoraTarget::O => self.o_proj.as_ref(),
            LoraTarget::Gate => self.gate_proj.as_ref(),
            LoraTarget::Up => self.up_proj.as_ref(),
            LoraTarget::Down => self.down_proj.as_ref(),
        }
    }

    /// Applies the adapters to `x` `[batch, seq, in]`, which has the layout of the layer's input. Returns this rank's
    /// part of the output, `[batch, seq, out]`. Sections without an adapter are zero.
    pub(in crate::nn) fn delta(&self, x: Tensor<3>) -> Tensor<3> {
        let x = self.dropout.forward(x, self.layout);
        let sections = self.sections.iter();
        let mut deltas: Vec<_> = sections
            .map(|(target, width)| (self.get(*target), *width))
            .map(|(adapter, width)| (adapter.map(|of| self.product(x.clone(), of)), width))
            .collect();
        if let [(delta, _)] = &mut deltas[..]
            && let Some(delta) = delta.take()
        {
            return delta;
        }
        // The output of any adapter has the sequence length of the layer's output, which is not split.
        let like = deltas.iter().find_map(|(delta, _)| delta.clone());
        let Some(like) = like else {
            unreachable!("a layer without adapters has no LoraAdapters")
        };
        let [batch, seq, _] = like.dims();
        let options = (&like.device().inner(), like.dtype());
        let zeros = |width| {
            let zeros = Tensor::zeros([batch, seq, width], options);
            if like.is_autodiff() {
                constant(zeros)
            } else {
                zeros
            }
        };
        let deltas = deltas
            .into_iter()
            .map(|(delta, width)| delta.unwrap_or_else(|| zeros(width)));
        Tensor::cat(deltas.collect(), 2)
    }

    /// Computes `s (x A) B`.
    fn product(&self, x: Tensor<3>, adapter: &LoraAdapter) -> Tensor<3> {
        let multiplied = |x: Tensor<3>, factor, input| {
            linear(x, LinearOperands::new(factor, input, self.kernels))
        };
        let inner = multiplied(x, &adapter.a, InputLayout::Local);
        let inner = inner.mul_scalar(adapter.scale);
        multiplied(inner, &adapter.b, self.inner.clone())
    }
}
