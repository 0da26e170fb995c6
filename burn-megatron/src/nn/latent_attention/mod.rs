//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).
//!
//! Keys and values are projections of a latent vector with `kv_rank` features per token. In addition, all heads share
//! one key with a rotary embedding. For an input `x` `[batch, seq, hidden]` and `n` heads:
//!
//! ```text
//! q              = x W_q                         or  norm(x W_qa) W_qb     [.., n, nope + rope]
//! c | k_rope     = x W_kva                                                 [.., kv_rank + rope]
//! k_nope | v     = norm(c) W_kvb                                           [.., n, nope + value]
//! k              = k_nope | rotated k_rope                                 [.., n, nope + rope]
//! y              = softmax(scale q k^T) v W_o
//! ```
//!
//! Heads are split over the tensor axis. The projections to latents, and the norms of the latents, are replicated.
//! Under context parallelism the ranks all-gather the latents (`kv_rank + rope` features per token). Each rank then
//! projects the latents of all tokens to keys and values. A KV cache also holds latents ([`cached`]).

mod cached;
mod forward;

use burn::config::Config;
use burn::module::Module;
use burn_megatron_kernels::attention::Heads;

use super::attention_core::AttentionCore;
use super::attention_logits::{AttentionLayer, HeadColumns, HeadPart};
use super::lora::LoraTarget;
use super::score_options::ScoreOptions;
use super::{
    ActivationLayout, BuildError, ColumnParallelLinear, ColumnParallelLinearConfig, Dropout, Init,
    ModelBuilder, Norm, NormConfig, NormKind, OutputSection, RecomputeModule, RecomputeRegion,
    ReplicatedLinear, ReplicatedLinearConfig, RowParallelLinear, RowParallelLinearConfig,
    unfused_reason,
};
use crate::collective::Comm;
use crate::kernel_selection::Operation;
use crate::mesh::{Axis, ContextExchange, LayoutError, ParallelConfig, split_evenly};

/// Configuration of a [`MultiLatentAttention`].
#[derive(Config, Debug)]
pub struct MultiLatentAttentionConfig {
    /// The hidden size: the number of features of the input and the output.
    pub hidden: usize,
    /// The number of heads.
    pub heads: usize,
    /// The number of features of the query latent (`q_lora_rank`). With `None`, the queries are projected directly from
    /// the input, as in DeepSeek-V2-Lite.
    pub q_rank: Option<usize>,
    /// The number of features of the key-value latent (`kv_lora_rank`).
    pub kv_rank: usize,
    /// The number of features of each query and key head without rotary embedding (`qk_nope_head_dim`).
    pub nope_width: usize,
    /// The number of features of each query and key head with rotary embedding (`qk_rope_head_dim`). It must be even.
    pub rope_width: usize,
    /// The number of features of each value head (`v_head_dim`).
    pub value_width: usize,
    /// The epsilon of the norms of the latents.
    #[config(default = 1e-6)]
    pub norm_epsilon: f64,
    /// The scale of the attention scores (`scale` in PyTorch's `scaled_dot_product_attention`). `None` uses
    /// `1 / sqrt(nope_width + rope_width)`. YaRN multiplies this default by the square of
    /// `0.1 mscale_all_dim ln(factor) + 1`.
    pub scale: Option<f64>,
    /// The dropout probability, applied to the attention probabilities.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// The initializer of the weights, except for the output projection.
    #[config(default = "Init::Normal(0.02)")]
    pub init: Init,
    /// The initializer of the weight of the output projection.
    #[config(default = "Init::Normal(0.02)")]
    pub output_init: Init,
}

/// Causal multi-head latent attention, without biases.
///
/// Each rank of the tensor axis holds an equal part of the heads.
///
/// ```
/// use burn::tensor::{DType, Device, Tensor};
/// use burn_megatron::kernels::rope::{RopeConfig, RopeTable, Scaling};
/// use burn_megatron::nn::{AttentionContext, MultiLatentAttentionConfig};
/// use burn_megatron::prelude::*;
///
/// let device = Device::flex();
/// let builder = ModelBuilder::new(&ParallelContext::single(), &device);
/// // 2 heads, a latent of 5 features, and head widths of 3 (nope), 4 (rope) and 2 (value).
/// let config = MultiLatentAttentionConfig::new(8, 2, 5, 3, 4, 2).with_q_rank(Some(6));
/// let attention = config.init(&builder)?;
/// assert_eq!(attention.down.weight.val().dims(), [8, 6 + 5 + 4]);
/// let rope = RopeConfig { width: 4, max_positions: 16, base: 10_000.0, scaling: Scaling::None };
/// let rotary = RopeTable::new(&rope, &device, DType::F32)?;
/// let x = Tensor::ones([1, 3, 8], &device);
/// let y = attention.forward(x, &rotary, AttentionContext::Rows);
/// assert_eq!(y.dims(), [1, 3, 8]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Module, Debug)]
pub struct MultiLatentAttention {
    /// The query projection from the input, `[hidden, heads * (nope + rope)]`. `None` if there is a query latent.
    pub query: Option<ColumnParallelLinear>,
    /// The projection to latents, `[hidden, q_rank + kv_rank + rope]`. Its output is the query latent (if `q_rank` is
    /// set), the key-value latent, and the shared key.
    pub down: ReplicatedLinear,
    /// The norm of the query latent.
    pub query_norm: Option<Norm>,
    /// The projection from the query latent to the queries, `[q_rank, heads * (nope + rope)]`.
    pub query_up: Option<ColumnParallelLinear>,
    /// The norm of the key-value latent.
    pub kv_norm: Norm,
    /// The projection from the key-value latent, `[kv_rank, heads * (nope + value)]`. Its output is the key and the
    /// value of each head.
    pub kv_up: ColumnParallelLinear,
    /// The output projection, `[heads * value, hidden]`.
    pub output: RowParallelLinear,
    dropout: Dropout,
    #[module(skip)]
    core: AttentionCore,
    #[module(skip)]
    sizes: Sizes,
    #[module(skip)]
    tensor: Comm,
    /// The ranks that share a sequence.
    #[module(skip)]
    context: Comm,
    #[module(skip)]
    sequence_parallel: bool,
    #[module(skip)]
    layout: ActivationLayout,
    #[module(skip)]
    fused_rope: bool,
    #[module(skip)]
    region: RecomputeRegion,
    #[module(skip)]
    projection_region: RecomputeRegion,
}

/// The sizes of a head on this rank.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// The number of heads of this rank.
    heads: usize,
    /// The size of the query latent, or 0 if there is no query latent.
    q_rank: usize,
    kv_rank: usize,
    nope: usize,
    rope: usize,
    value: usize,
}

impl MultiLatentAttentionConfig {
    /// Returns the number of features of each query and key head.
    pub fn head_width(&self) -> usize {
        self.nope_width + self.rope_width
    }

    /// Returns the exchange of keys and values that `layout` uses for context parallelism, or `None` without context
    /// parallelism.
    ///
    /// # Errors
    ///
    /// A message if `layout` requests an exchange other than the all-gather.
    pub fn context_exchange(layout: &ParallelConfig) -> Result<Option<ContextExchange>, String> {
        match layout.context_exchange {
            _ if layout.context == 1 => Ok(None),
            None | Some(ContextExchange::AllGather) => Ok(Some(ContextExchange::AllGather)),
            Some(other) => Err(format!(
                "context_exchange = {other} conflicts with latent attention, which gathers latents: expected all-gather"
            )),
        }
    }

    /// Builds this rank's part of the layer.
    ///
    /// # Errors
    ///
    /// [`BuildError`] for
    ///
    /// - a size of 0 or an odd `rope_width`;
    /// - heads that cannot be split over the tensor axis;
    /// - a context-parallel exchange other than the all-gather, or hybrid context parallelism;
    /// - LoRA targets that include the queries.
    pub fn init(&self, builder: &ModelBuilder) -> Result<MultiLatentAttention, BuildError> {
        self.check(builder)?;
        if builder.groups().config().hybrid_tokens().is_some() {
            let error = LayoutError::HybridContext {
                setting: "latent attention".into(),
                expected: "attention of heads with keys and values of their own".into(),
            };
            return Err(builder.error(error.to_string()));
        }
        if let Some(lora) = builder.lora_config()
            && lora.targets().contains(&LoraTarget::Q)
        {
            return Err(builder.error(
                "lora.target_modules has q_proj or all-linear, but only o_proj of latent attention can have an adapter",
            ));
        }
        let (groups, place) = (builder.groups(), builder.place());
        let heads = split_evenly("heads", self.heads, Axis::Tensor, place.size)?;
        let (nope, value, width) = (self.nope_width, self.value_width, self.head_width());
        let of_heads = |name: &str, input: usize, width: usize| {
            let section = OutputSection::new("heads".into(), self.heads, width);
            ColumnParallelLinearConfig::new(input, self.heads * width)
                .with_sections(vec![section])
                .with_init(self.init)
                .with_bias(false)
                .init(&builder.child(name))
        };
        let norm = |name: &str, rank| {
            NormConfig::new(NormKind::Rms, rank, self.norm_epsilon).init(&builder.child(name))
        };
        let latents = self.q_rank.unwrap_or(0) + self.kv_rank + self.rope_width;
        let down = ReplicatedLinearConfig::new(self.hidden, latents).with_init(self.init);
        let output = RowParallelLinearConfig::new(self.heads * value, self.hidden)
            .with_init(self.output_init)
            .with_bias(false)
            .with_target(Some(LoraTarget::O));
        let of_rank = Heads {
            heads,
            groups: heads,
            width,
        };
        if let Some(reason) = unfused_reason(self.dropout, width.max(value), None) {
            let mut kernels = builder.kernels();
            kernels.keep_unfused(Operation::Attention, reason)?;
        }
        let scores = ScoreOptions {
            scale: Some(self.scale.unwrap_or(1.0 / (width as f64).sqrt())),
            ..ScoreOptions::default()
        };
        let layer = self.measured_layer(builder);
        let core = AttentionCore::new(builder, layer, (of_rank, value), scores, vec![])?;
        let query = match self.q_rank {
            Some(_) => None,
            None => Some(of_heads("query", self.hidden, width)?),
        };
        let query_up = self.q_rank.map(|rank| of_heads("query_up", rank, width));
        Ok(MultiLatentAttention {
            query,
            down: down.init(&builder.child("down"))?,
            query_norm: self.q_rank.map(|rank| norm("query_norm", rank)),
            query_up: query_up.transpose()?,
            kv_norm: norm("kv_norm", self.kv_rank),
            kv_up: of_heads("kv_up", self.kv_rank, nope + value)?,
            output: output.init(&builder.child("output"))?,
            dropout: Dropout::new(self.dropout, &builder.child("dropout"))?,
            core,
            sizes: Sizes {
                heads,
                q_rank: self.q_rank.unwrap_or(0),
                kv_rank: self.kv_rank,
                nope,
                rope: self.rope_width,
                value,
            },
            tensor: groups.tensor().clone(),
            context: groups.context().clone(),
            sequence_parallel: builder.sequence_parallel(),
            layout: ActivationLayout::SplitAlong { dim: 1, place },
            fused_rope: builder.is_fused(Operation::Rope),
            region: builder.recompute_region(None),
            projection_region: builder
                .recompute_fused(RecomputeModule::MlaUpProjection, Operation::Attention)?,
        })
    }

    /// All heads share the key with the rotary embedding. To limit logits with this key, only the queries can be
    /// scaled.
    fn measured_layer(&self, builder: &ModelBuilder) -> AttentionLayer {
        let query = match self.q_rank {
            Some(_) => "query_up",
            None => "query",
        };
        let columns = |linear, parts| HeadColumns {
            linear: builder.child(linear).path().into(),
            first: 0,
            units: self.heads,
            parts,
        };
        let of_query = vec![
            (HeadPart::Query, self.nope_width),
            (HeadPart::SharedKeyQuery, self.rope_width),
        ];
        let of_key = vec![
            (HeadPart::Key, self.nope_width),
            (HeadPart::Value, self.value_width),
        ];
        AttentionLayer {
            path: builder.path().into(),
            stage: builder.stage,
            heads: self.heads,
            groups: self.heads,
            has_norm: false,
            columns: vec![columns(query, of_query), columns("kv_up", of_key)],
        }
    }

    fn check(&self, builder: &ModelBuilder) -> Result<(), BuildError> {
        let sizes = [
            ("q_rank", self.q_rank.unwrap_or(1)),
            ("kv_rank", self.kv_rank),
            ("nope_width", self.nope_width),
            ("rope_width", self.rope_width),
            ("value_width", self.value_width),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(builder.error(format!("invalid {name} = 0: expected at least 1")));
        }
        if !self.rope_width.is_multiple_of(2) {
            return Err(builder.error(format!(
                "invalid rope_width = {}: expected an even number, because pairs of features are rotated",
                self.rope_width
            )));
        }
        let exchange = Self::context_exchange(builder.groups().config());
        exchange.map(drop).map_err(|reason| builder.error(reason))
    }
}
