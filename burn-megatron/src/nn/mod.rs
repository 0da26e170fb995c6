//! Layers with tensor, sequence, context and expert parallelism, as Burn modules.
//!
//! Each layer is built with a [`ModelBuilder`], to which it declares how each parameter is split over the ranks. These
//! declarations form the [`ParameterTable`] of the model. On a single rank each layer is an ordinary layer.
//!
//! Activations have the shape `[batch, seq, hidden]`. Under sequence parallelism (Korthikanti et al. 2022) the
//! activations between the blocks have the shape `[batch, seq / tensor, hidden]`. [`ModelBuilder::sequence_parallel`]
//! returns whether sequence parallelism is enabled.
//!
//! | layer | split over the ranks |
//! |---|---|
//! | [`ColumnParallelLinear`] | output features |
//! | [`RowParallelLinear`] | input features |
//! | [`VocabParallelEmbedding`], [`OutputLayer`], [`VocabParallelCrossEntropy`], [`LinearCrossEntropy`] | the vocabulary |
//! | [`ParallelAttention`], [`MultiLatentAttention`] | heads |
//! | [`ParallelMlp`] | intermediate features |
//! | [`moe::MoeMlp`] | experts, and the intermediate features of each expert |
//! | [`Norm`], [`LearnedPositions`], [`ReplicatedLinear`] | no parameter; under sequence parallelism the input is split along the sequence |
//!
//! [`ColumnParallelLinear`] and [`RowParallelLinear`] can compute in FP8: see [`fp8`].
//!
//! Attention and position embeddings support packed documents ([`PackedSequences`]) and generation with a KV cache
//! ([`KvCache`]). [`BatchFormat`] and [`AttentionContext`] select between these cases.
//!
//! The weights of a model can be frozen, and low-rank adapters can be trained instead: see [`lora`].
//!
//! The activations of any block can be recomputed in the backward pass. The block may use these layers or burn-nn
//! layers. See [`recompute`].

mod activation;
mod arithmetic;
mod attention;
mod attention_core;
mod attention_engine;
mod attention_logits;
mod batch_format;
mod bias;
mod build_error;
mod column;
pub mod context;
pub mod deferred_lookups;
mod dropout;
mod dropout_position;
mod dropout_rows;
mod embedding;
mod entry;
mod forward_context;
pub mod fp8;
mod gelu_epilogue;
pub(crate) mod gradient_slot;
pub mod hook;
mod init;
mod input_layout;
mod kv_buffer;
mod kv_cache;
mod latent_attention;
mod layer_arithmetic;
mod linear;
mod linear_function;
mod linear_input;
mod local_shards;
mod lookup;
pub mod lora;
mod loss;
mod mlp;
mod model_builder;
pub mod moe;
mod norm;
mod of_all_stages;
mod parameter_spec;
mod placement;
mod product_span;
mod qk_norm;
mod real_tokens;
mod recompute;
mod replicated;
mod replicated_linear;
mod residual;
mod row;
pub mod schedule_nodes;
mod score_options;
mod table;
mod tensor_slice;
#[cfg(test)]
mod tests;
mod tokens;
pub mod tp_comm_overlap;
mod unsaved;
mod weight;
mod wide;

pub use crate::mesh::{AxisRank, MeshRank};
pub use activation::Activation;
pub use arithmetic::LinearKernels;
pub use attention::{ParallelAttention, ParallelAttentionConfig, unfused_reason};
pub use attention_logits::{AttentionLayer, AttentionLogits, HeadPart};
pub use batch_format::{
    AttentionContext, BatchFormat, OwnedAttentionContext, PackedSequences, PackedSequencesError,
};
pub use bias::Bias;
pub use build_error::BuildError;
pub use column::{ColumnParallelLinear, ColumnParallelLinearConfig, OutputSection};
pub use dropout::{ActivationLayout, Dropout};
pub use dropout_position::{BatchPosition, DropoutPosition};
pub use embedding::{
    LearnedPositions, LearnedPositionsConfig, OutputLayer, OutputLayerConfig,
    VocabParallelEmbedding, VocabParallelEmbeddingConfig, Vocabulary,
};
pub use entry::ParameterEntry;
pub use hook::anchored_value;
pub use init::Init;
#[cfg(test)]
pub(crate) use input_layout::InputLayout;
pub use input_layout::SEQUENCE_DIM;
pub use kv_cache::{KvCache, LayerKvCache, NewTokens, SequencePart};
pub use latent_attention::{MultiLatentAttention, MultiLatentAttentionConfig};
#[cfg(test)]
pub(crate) use linear::{LinearOperands, linear};
pub use linear_input::LinearInput;
pub use local_shards::{LocalShard, local_shards};
pub use loss::{
    LinearCrossEntropy, LogitsShape, LossFactor, LossTerm, Losses, SummedLosses,
    VocabParallelCrossEntropy,
};
pub use mlp::{ParallelMlp, ParallelMlpConfig};
pub(crate) use model_builder::placeholder;
pub use model_builder::{ModelBuilder, ParallelModule};
pub use norm::{Norm, NormConfig, NormKind};
pub use parameter_spec::ParameterSpec;
pub use placement::{LocalSection, Placement, Placements, Section};
pub use qk_norm::{QkNorm, QkNormConfig};
pub use real_tokens::RealTokens;
pub use recompute::{
    ActivationOffload, ActivationUsage, LayerRun, OffloadNote, Recompute, RecomputeConfig,
    RecomputeError, RecomputeGranularity, RecomputeLayers, RecomputeMethod, RecomputeModule,
    RecomputeRegion, recompute, recompute_at,
};
pub use replicated_linear::{ReplicatedLinear, ReplicatedLinearConfig};
pub use residual::Residual;
pub use row::{RowParallelLinear, RowParallelLinearConfig};
pub use schedule_nodes::ScheduleNodes;
pub use table::{ParameterTable, TableError};
pub use tensor_slice::{ContiguousRun, TensorSlice};
pub use tokens::Tokens;
pub(crate) use tp_comm_overlap::TpCommOverlapGroup;
