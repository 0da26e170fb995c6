//! Causal self-attention whose heads are split over the tensor axis.

use std::sync::Arc;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::Tensor;

use burn_megatron_kernels::attention::{Heads, MAX_WIDTH, Window};
use burn_megatron_kernels::rope::{self, Positions, RopeOptions, RopeTable};

use super::attention_core::AttentionCore;
use super::attention_logits::{AttentionLayer, HeadColumns, HeadPart};
use super::context::{ContextAttention, KeyValueExchange, OuterGroup};
use super::lora::LoraTarget;
use super::qk_norm::WholeNorm;
use super::score_options::ScoreOptions;
use super::{
    ActivationLayout, AttentionContext, Bias, BuildError, ColumnParallelLinear,
    ColumnParallelLinearConfig, Dropout, Init, ModelBuilder, Norm, OutputSection, ParameterSpec,
    Placement, QkNormConfig, RecomputeModule, RecomputeRegion, Residual, RowParallelLinear,
    RowParallelLinearConfig, anchored_value,
};
use crate::kernel_selection::Operation;
use crate::mesh::{Axis, split_evenly};

/// Configuration of a [`ParallelAttention`].
#[derive(Config, Debug)]
pub struct ParallelAttentionConfig {
    /// The hidden size: the number of features of the input and the output.
    pub hidden: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key-value heads (query groups): `heads` for multi-head attention, 1 for multi-query attention.
    pub groups: usize,
    /// The number of features per head.
    pub head_width: usize,
    /// Whether the output projection has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Whether the QKV projection has a bias.
    #[config(default = true)]
    pub qkv_bias: bool,
    /// The RMSNorm of queries and keys. `None` applies no norm.
    pub qk_norm: Option<QkNormConfig>,
    /// The sliding window: the number of tokens that a query attends to, including its own token. `None` attends to all
    /// earlier tokens.
    pub window: Option<usize>,
    /// Whether each head has an attention sink: a learned logit in the softmax denominator, as in gpt-oss.
    #[config(default = false)]
    pub sinks: bool,
    /// The scale of the attention scores (`scale` in PyTorch's `scaled_dot_product_attention`). `None` uses
    /// `1 / sqrt(head_width)`.
    pub scale: Option<f64>,
    /// The soft cap `c`: a scaled score `s` is replaced by `c tanh(s / c)`, as in Gemma 2. Attention with a soft cap is
    /// not fused.
    pub soft_cap: Option<f64>,
    /// The dropout probability, applied to the attention probabilities.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// The maximum sequence length, in tokens. Context parallelism uses this length to choose how ranks exchange keys
    /// and values.
    #[config(default = 4096)]
    pub sequence: usize,
    /// The initializer of the fused QKV weight.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The initializer of the weight of the output projection.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
}

/// Causal self-attention: multi-head, grouped-query or multi-query.
///
/// Each rank of the tensor axis holds an equal part of the heads. If there are fewer key-value heads than ranks,
/// adjacent ranks hold replicas of the same key-value head. The gradients of the replicas are summed.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_megatron::kernels::rope::{RopeConfig, RopeTable, Scaling};
/// use burn_megatron::nn::ParallelAttentionConfig;
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_tensor(2);
/// let shapes = World::threads(2)?.run(|rank| {
///     let (groups, device) = (ParallelContext::new(&layout, &rank)?, Device::flex());
///     let builder = ModelBuilder::new(&groups, &device);
///     // 4 query heads and 2 key-value heads of width 4.
///     let attention = ParallelAttentionConfig::new(8, 4, 2, 4).init(&builder)?;
///     let rope = RopeConfig { width: 4, max_positions: 16, base: 10_000.0, scaling: Scaling::None };
///     let rotary = RopeTable::new(&rope, &device, DType::F32)?;
///     let y = attention.forward(Tensor::ones([1, 3, 8], &device), Some(&rotary));
///     Ok::<_, AnyError>((attention.qkv.weight.val().dims(), y.dims()))
/// })?;
/// assert_eq!(shapes, [([8, 2 * 4 + 2 * 4], [1, 3, 8]); 2]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct ParallelAttention {
    /// The fused QKV projection.
    pub qkv: ColumnParallelLinear,
    /// The output projection.
    pub output: RowParallelLinear,
    /// The norm of the queries, over the features of each head or of all heads together. It is applied before the
    /// rotary embedding.
    pub q_norm: Option<Norm>,
    /// The norm of the keys, applied in the same way as `q_norm`.
    pub k_norm: Option<Norm>,
    /// This rank's part of the attention sinks `[heads]`: one logit per head.
    pub sinks: Option<Param<Tensor<1>>>,
    dropout: Dropout,
    #[module(skip)]
    whole_norm: Option<WholeNorm>,
    #[module(skip)]
    core: AttentionCore,
    #[module(skip)]
    layout: ActivationLayout,
    #[module(skip)]
    fused_rope: bool,
    #[module(skip)]
    region: RecomputeRegion,
    #[module(skip)]
    core_region: RecomputeRegion,
}

impl ParallelAttentionConfig {
    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] if `heads` or `groups` cannot be split over the tensor axis, if `groups` does not divide
    /// `heads`, or if `window` is 0.
    pub fn init(&self, builder: &ModelBuilder) -> Result<ParallelAttention, BuildError> {
        let place = builder.place();
        let heads = split_evenly("heads", self.heads, Axis::Tensor, place.size)?;
        if self.groups == 0 || !self.heads.is_multiple_of(self.groups) {
            let fits: Vec<_> = (1..=self.heads)
                .filter(|n| self.heads.is_multiple_of(*n))
                .collect();
            return Err(builder.error(format!(
                "{} heads cannot share {} groups of keys and values: use one of {fits:?} groups",
                self.heads, self.groups,
            )));
        }
        let section = |unit: &str, units| OutputSection::new(unit.into(), units, self.head_width);
        let kv = section("groups of keys and values", self.groups).with_shared(true);
        let queries = section("heads", self.heads);
        let sections = vec![queries.clone(), kv.clone(), kv.clone()];
        let output = (self.heads + 2 * self.groups) * self.head_width;
        let qkv = ColumnParallelLinearConfig::new(self.hidden, output)
            .with_sections(sections)
            .with_init(self.init)
            .with_bias(self.qkv_bias)
            .with_targets(vec![LoraTarget::Q, LoraTarget::K, LoraTarget::V])
            .init(&builder.child("qkv"))?;
        let output = RowParallelLinearConfig::new(self.heads * self.head_width, self.hidden)
            .with_init(self.output_init)
            .with_bias(self.bias)
            .with_target(Some(LoraTarget::O))
            .init(&builder.child("output"))?;
        self.check_fused(builder)?;
        if self.window == Some(0) {
            return Err(builder.error("invalid window 0: expected at least 1 token".to_string()));
        }
        let heads = Heads {
            heads,
            groups: (self.groups / place.size).max(1),
            width: self.head_width,
        };
        let window = self.window.map(|tokens| Window {
            left: tokens - 1,
            right: 0,
        });
        let fused = builder.is_fused(Operation::Attention);
        let context = ContextAttention::new(builder, heads, self.sequence, fused)?;
        let scores = ScoreOptions {
            window,
            scale: self.scale,
            soft_cap: self.soft_cap,
        };
        let layer = self.measured_layer(builder);
        let core = AttentionCore::new(builder, layer, (heads, heads.width), scores, context)?;
        let norm = |name: &str, units: &OutputSection| {
            let norm = self.qk_norm.as_ref();
            let norm = norm.map(|norm| norm.init(units, &builder.child(name)));
            norm.transpose()
        };
        let sinks = ParameterSpec::new([self.heads], self.init)
            .with_placement(Axis::Tensor, Placement::split(0, self.heads, place.size));
        Ok(ParallelAttention {
            qkv,
            output,
            q_norm: norm("q_norm", &queries)?,
            k_norm: norm("k_norm", &kv)?,
            sinks: self.sinks.then(|| builder.parameter("sinks", sinks)),
            whole_norm: match &self.qk_norm {
                Some(norm) => norm.over_ranks([&queries, &kv], builder)?,
                None => None,
            },
            dropout: Dropout::new(self.dropout, &builder.child("dropout"))?,
            core,
            layout: ActivationLayout::SplitAlong { dim: 1, place },
            fused_rope: builder.is_fused(Operation::Rope),
            region: builder.recompute_region(None),
            core_region: builder.recompute_part(RecomputeModule::CoreAttention),
        })
    }

    fn measured_layer(&self, builder: &ModelBuilder) -> AttentionLayer {
        let columns = |first: usize, units, part| HeadColumns {
            linear: builder.child("qkv").path().into(),
            first: first * self.head_width,
            units,
            parts: vec![(part, self.head_width)],
        };
        AttentionLayer {
            path: builder.path().into(),
            stage: builder.stage,
            heads: self.heads,
            groups: self.groups,
            has_norm: self.qk_norm.is_some(),
            columns: vec![
                columns(0, self.heads, HeadPart::Query),
                columns(self.heads, self.groups, HeadPart::Key),
            ],
        }
    }

    /// Marks attention as unfused if the kernels do not support this configuration.
    fn check_fused(&self, builder: &ModelBuilder) -> Result<(), BuildError> {
        if let Some(reason) = unfused_reason(self.dropout, self.head_width, self.soft_cap) {
            let mut kernels = builder.kernels();
            kernels.keep_unfused(Operation::Attention, reason)?;
        }
        Ok(())
    }
}

/// Returns the reason why fused kernels do not support attention with these settings, or `None` if they support it.
pub fn unfused_reason(dropout: f64, head_width: usize, soft_cap: Option<f64>) -> Option<String> {
    if dropout > 0.0 {
        return Some("the attention's dropout acts on its probabilities".into());
    }
    if soft_cap.is_some() {
        return Some("the attention's scores have a soft cap".into());
    }
    let is_too_wide = head_width > MAX_WIDTH;
    is_too_wide.then(|| format!("heads of {head_width} features are wider than {MAX_WIDTH}"))
}

impl ParallelAttention {
    /// Replaces the implementation of the key-value exchange of context parallelism. `exchange` is called once for each
    /// group of ranks that exchange keys and values, and returns the new implementation. Without context parallelism
    /// this method has no effect.
    pub fn with_exchange(
        mut self,
        exchange: impl Fn(OuterGroup) -> Arc<dyn KeyValueExchange>,
    ) -> Self {
        for context in &mut self.core.context {
            context.exchange = Some(exchange(context.groups.outer.clone()));
        }
        self
    }

    /// Applies attention to `[batch, seq, hidden]` and returns the same shape. Under sequence parallelism the shape is
    /// `[batch, seq / tensor, hidden]`. If `rotary` is given, this rotary embedding is applied to queries and keys.
    pub fn forward(&self, x: Tensor<3>, rotary: Option<&RopeTable>) -> Tensor<3> {
        self.forward_with_context(x, rotary, AttentionContext::Rows)
    }

    /// Applies attention as [`forward`](Self::forward) does, to a batch that `context` describes. The batch may contain
    /// packed documents, a part of each sequence under context parallelism, or new tokens of a KV cache.
    ///
    /// # Panics
    ///
    /// With a KV cache, in these cases:
    ///
    /// - the tokens exceed the capacity of the cache;
    /// - the number of sequences differs from the number of sequences in the cache;
    /// - the tensors are on an autodiff device.
    pub fn forward_with_context(
        &self,
        x: Tensor<3>,
        rotary: Option<&RopeTable>,
        context: AttentionContext<'_>,
    ) -> Tensor<3> {
        let y = match self.body(rotary, &context) {
            Some(body) => self.output.reduced(self.region.run(x, body)),
            None => self.output.product(self.attend(x, rotary, context)),
        };
        self.output.with_bias(y)
    }

    /// Adds the pending branch of `x` to the residual stream, normalizes the sum with `norm`, and applies attention to
    /// the normalized values. Returns the attention output without the bias, the bias, and the sum, which is the new
    /// residual stream. The caller adds the bias in a fused operation.
    ///
    /// `norm` must be built with [`NormConfig::init_for_linear`](super::NormConfig::init_for_linear).
    ///
    /// # Panics
    ///
    /// See [`forward_with_context`](Self::forward_with_context).
    pub fn forward_normalized(
        &self,
        norm: &Norm,
        x: Residual,
        rotary: Option<&RopeTable>,
        context: AttentionContext<'_>,
    ) -> ((Tensor<3>, Option<Bias>), Tensor<3>) {
        let (y, stream) = match self.body(rotary, &context) {
            Some(body) => {
                let (partial, stream) = norm.run_in(&self.region, x, body);
                (self.output.reduced(partial), stream)
            }
            None => {
                let (qkv, stream) = self.qkv.forward_normalized(norm, x);
                let attended = self.attend_projection(qkv, rotary, context);
                (self.output.product(attended), stream)
            }
        };
        let bias = self.output.bias_of(&y);
        ((y, bias), stream)
    }

    /// Returns the body of the recomputed region, or `None` if the region is not recomputed now.
    fn body(
        &self,
        rotary: Option<&RopeTable>,
        context: &AttentionContext<'_>,
    ) -> Option<impl Fn(Tensor<3>) -> Tensor<3> + use<>> {
        let owned = self.region.is_active().then(|| context.to_owned_context());
        let context = owned.flatten()?;
        let (layer, rotary) = (self.clone(), rotary.cloned());
        Some(move |x| {
            let attended = layer.attend(x, rotary.as_ref(), context.context());
            layer.output.partial(attended)
        })
    }

    /// Returns the attention output of this rank's heads.
    fn attend(
        &self,
        x: Tensor<3>,
        rotary: Option<&RopeTable>,
        context: AttentionContext<'_>,
    ) -> Tensor<3> {
        self.attend_projection(self.qkv.forward(x), rotary, context)
    }

    /// Returns the attention output of this rank's heads, given the QKV projection.
    fn attend_projection(
        &self,
        qkv: Tensor<3>,
        rotary: Option<&RopeTable>,
        context: AttentionContext<'_>,
    ) -> Tensor<3> {
        let normalised = self.normalise(qkv);
        let qkv = match rotary {
            Some(table) => {
                let [_, seq, _] = normalised.dims();
                let positions = context.positions(table, seq, &normalised.device());
                self.rotate(normalised, table, &positions)
            }
            None => normalised,
        };
        let owned = self
            .core_region
            .is_active()
            .then(|| context.to_owned_context());
        let Some(context) = owned.flatten() else {
            return self.attend_core(qkv, context);
        };
        let layer = self.clone();
        self.core_region
            .run(qkv, move |qkv| layer.attend_core(qkv, context.context()))
    }

    /// Returns the attention output of this rank's heads, given the QKV projection after the norms and the rotary
    /// embedding.
    fn attend_core(&self, qkv: Tensor<3>, context: AttentionContext<'_>) -> Tensor<3> {
        let dropout = |weights, rows| self.dropout.forward_rows(weights, rows, self.layout);
        let sink = self.sinks.as_ref();
        let sink = sink.map(|sinks| anchored_value(sinks, &qkv));
        self.core.attend(qkv, sink, context, dropout)
    }

    /// Applies the QK norms to a QKV projection.
    fn normalise(&self, qkv: Tensor<3>) -> Tensor<3> {
        let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) else {
            return qkv;
        };
        let ([batch, seq, _], heads) = (qkv.dims(), self.core.heads);
        let part = |first: usize, count: usize| {
            qkv.clone()
                .narrow(2, first * heads.width, count * heads.width)
        };
        let [q, k] = [part(0, heads.heads), part(heads.heads, heads.groups)];
        let normal = |norm: &Norm, x: Tensor<3>| {
            let [.., features] = x.dims();
            // The norm is computed over the features of all heads, or over the features of each head.
            let [width] = norm.weight.lazy_shape().dims();
            let rows = x.reshape([batch, seq * features / width, width]);
            norm.forward(rows).reshape([batch, seq, features])
        };
        let [q, k] = match &self.whole_norm {
            Some(whole) => whole.forward([q, k], [q_norm, k_norm]),
            None => [normal(q_norm, q), normal(k_norm, k)],
        };
        let v = part(heads.heads + heads.groups, heads.groups);
        Tensor::cat(vec![q, k, v], 2)
    }

    /// Applies the rotary embedding to the queries and keys of a QKV projection.
    fn rotate(&self, qkv: Tensor<3>, table: &RopeTable, positions: &Positions) -> Tensor<3> {
        let ([batch, seq, features], heads) = (qkv.dims(), self.core.heads);
        let x = qkv.reshape([batch, seq, features / heads.width, heads.width]);
        let options = RopeOptions {
            heads: Some(heads.heads + heads.groups),
            ..RopeOptions::default()
        };
        let rotated = if self.fused_rope {
            rope::rotate(x, table, positions, &options)
        } else {
            rope::composed::rotate(x, table, positions, &options)
        };
        rotated.reshape([batch, seq, features])
    }
}
