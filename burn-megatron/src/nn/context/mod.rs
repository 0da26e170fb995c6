//! Context parallelism: each sequence is split over the ranks of the context axis, which exchange data in attention
//! layers.
//!
//! - A [`SequenceShard`] describes which tokens of a batch a rank holds. It is part of [`Tokens`](super::Tokens). All
//!   layers except attention process each token separately, so they need no communication. Position embeddings, dropout
//!   and the loss use the index of each token in the complete batch.
//! - In an attention layer, a [`ContextExchange`] gives the queries of a rank access to the keys and values of other
//!   ranks. The exchange has two parts: an all-to-all of heads inside groups of neighbouring ranks, and a
//!   [`KeyValueExchange`] between these groups, which is [`Ring`] or [`AllGather`].
//! - [`ExchangeProblem`] computes the communication volume of each exchange, and chooses between exchanges.
//!
//! Attention results that are merged from several blocks, and the gradients of keys and values, are computed in f32 (in
//! f64 for f64 inputs). See [`merge`]. With the all-to-all and the all-gather, the attention of each query is computed
//! from the same keys, in the same order, as on a single rank.
//!
//! Context parallelism splits no parameter. The gradient of each parameter on a rank is a partial sum, which is reduced
//! over the context and data axes.

mod attention;
mod cache;
mod choose;
mod exchange;
mod function;
mod groups;
mod head_split;
mod order;
mod partial;
mod shard;
#[cfg(test)]
mod tests;
mod unfused;

use std::sync::Arc;

pub(super) use attention::ContextAttention;
use burn_megatron_kernels::attention::Heads;
pub use burn_megatron_kernels::attention::merge;
pub(super) use cache::{CacheAttention, CacheSplit};
pub use choose::{ExchangeCost, ExchangeProblem, LinkSpeed};
pub use exchange::{AllGather, KeyValueExchange, OuterGroup, Ring};
pub use groups::ContextGroups;
pub use partial::{PartialAttention, PartialGradients, PartialResult};
pub use shard::{SequenceShard, TokenPlaces};
pub(super) use unfused::QueryRows;

use super::{BuildError, ModelBuilder};
use crate::mesh::{ContextExchange, LayoutError};

impl ContextAttention {
    /// Creates the context-parallel exchanges of an attention layer. `heads` describes the heads of a tensor rank, and
    /// sequences have up to `tokens` tokens. There is one exchange for each number of ranks that may share a batch.
    /// Without context parallelism there is no exchange, and with hybrid context parallelism there are several. `fused`
    /// is true if attention is fused.
    ///
    /// The first call is collective over the context axis, or over all ranks of the stage with hybrid context
    /// parallelism. Call it on all ranks, in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the heads do not fit the exchange, or if a ring is combined with unfused attention.
    /// [`BuildError::Comm`] if the collective fails.
    pub fn new(
        builder: &ModelBuilder,
        heads: Heads,
        tokens: usize,
        fused: bool,
    ) -> Result<Vec<Self>, BuildError> {
        let groups = builder.groups();
        let (layout, ranks) = (groups.config(), groups.context().size());
        if layout.hybrid_tokens().is_some() {
            return Self::hybrid(builder, fused);
        }
        if ranks == 1 {
            return Ok(vec![]);
        }
        let bytes = builder.compute_dtype().size();
        let problem = ExchangeProblem::of_layout(layout, heads, tokens, bytes);
        let exchange = problem.resolve(layout.context_exchange, fused);
        let exchange = exchange.map_err(|reason| builder.error(reason))?;
        let groups = builder.context_groups(problem.neighbours(exchange))?;
        Ok(vec![Self {
            exchange: between(exchange, &groups),
            groups,
            narrow_gradients: layout.context_narrow_gradients,
        }])
    }

    /// Builds the attention for the groups of all powers of two. Uses a ring unless the layout requests the
    /// all-gather.
    fn hybrid(builder: &ModelBuilder, fused: bool) -> Result<Vec<Self>, BuildError> {
        if !fused {
            let setting = "attention that holds its scores in memory (it has dropout, a soft cap or wide heads, or the kernel \
                           is turned off)";
            let error = LayoutError::HybridContext {
                setting: setting.into(),
                expected: "fused attention".into(),
            };
            return Err(builder.error(error.to_string()));
        }
        let layout = builder.groups().config();
        let exchange = match layout.context_exchange {
            Some(ContextExchange::AllGather) => ContextExchange::AllGather,
            _ => ContextExchange::Ring,
        };
        let groups = builder.hybrid_context_groups()?.into_iter();
        let of_size = groups.map(|groups| Self {
            exchange: between(exchange, &groups).filter(|_| groups.comm.size() > 1),
            groups,
            narrow_gradients: layout.context_narrow_gradients,
        });
        Ok(of_size.collect())
    }
}

/// Returns the exchange of keys and values between groups of neighbours, or `None` for an all-to-all of all ranks.
fn between(exchange: ContextExchange, groups: &ContextGroups) -> Option<Arc<dyn KeyValueExchange>> {
    let outer = groups.outer.clone();
    match exchange {
        ContextExchange::AllToAll => None,
        ContextExchange::AllGather => Some(Arc::new(AllGather(outer))),
        ContextExchange::Ring | ContextExchange::Hierarchical => Some(Arc::new(Ring(outer))),
    }
}
