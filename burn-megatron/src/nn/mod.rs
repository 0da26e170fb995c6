//! Parallel layers as Burn modules.
//!
//! A layer is built from a [`Scope`], where it declares how each of its parameters lies on the
//! tensor axis; the [`ParameterTable`] of the model follows from that. Its forward knows no ranks:
//! communication stands inside of the operations it calls. On one rank each layer is the plain one.
//!
//! Activations are `[batch, seq, hidden]`; under sequence parallelism (Korthikanti et al. 2022)
//! those between the blocks are `[batch, seq / tensor, hidden]`.
//!
//! | layer | what is split |
//! |---|---|
//! | [`ColumnParallelLinear`] | output features |
//! | [`RowParallelLinear`] | input features |
//! | [`VocabParallelEmbedding`], [`OutputLayer`], [`VocabParallelCrossEntropy`] | the vocabulary |
//! | [`ParallelAttention`] | heads |
//! | [`ParallelMlp`] | width |
//! | [`Norm`], [`LearnedPositions`] | nothing; the sequence where that is parallel |
//!
//! [`ColumnParallelLinear`] and [`RowParallelLinear`] multiply in 8 bits where the scope says so: [`fp8`].
//!
//! Attention and positions can be told what tokens see besides their row ([`Reading`], [`Sight`]):
//! several documents in a row ([`Packed`]), or tokens that were read before ([`KvCache`]).
//!
//! Any block, of these layers or of burn-nn's, can be run again in the backward instead of being
//! remembered: [`recompute`].

mod activation;
mod arithmetic;
mod attention;
mod attention_core;
mod column;
pub mod door;
mod dropout;
mod embedding;
pub mod fp8;
mod init;
mod kv_cache;
mod linear;
mod lookup;
mod loss;
mod mlp;
mod norm;
mod placement;
mod position;
mod recompute;
mod row;
mod scope;
mod sight;
mod table;
#[cfg(test)]
mod tests;

pub use crate::mesh::Place;
pub use activation::Activation;
pub use attention::{ParallelAttention, ParallelAttentionConfig, why_unfused};
pub use column::{ColumnParallelLinear, ColumnParallelLinearConfig, OutputSection};
pub use door::value_at;
pub use dropout::{Dropout, Lies};
pub use embedding::{LearnedPositions, OutputLayer, VocabParallelEmbedding, Vocabulary};
pub use init::Init;
pub use kv_cache::{CachedLayer, KvCache};
pub use linear::{InputLies, SEQUENCE_DIM, Weight, linear};
pub use loss::{LossTerm, Losses, VocabParallelCrossEntropy};
pub use mlp::{ParallelMlp, ParallelMlpConfig};
pub use norm::{Norm, NormConfig, NormKind};
pub use placement::{Placement, Section};
pub use position::Position;
pub use recompute::{recompute, recompute_at};
pub use row::{RowParallelLinear, RowParallelLinearConfig};
pub(crate) use scope::placeholder;
pub use scope::{BuildError, ParallelModule, ParameterSpec, Scope};
pub use sight::{Packed, PackedError, Reading, Sight};
pub use table::{ParameterEntry, ParameterTable, TableError};
