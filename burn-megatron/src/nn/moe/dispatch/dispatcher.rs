//! The interface of token dispatchers for MoE layers.

use std::fmt;

use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::exchange::Exchanges;
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The method of exchanging tokens with the ranks of their experts.
///
/// `R` ranks of the expert axis exchange the rows of `T` tokens of each rank, with `k` experts per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DispatcherKind {
    /// Sends a token to each of its experts: `T k (R - 1) / R` rows in each direction.
    AllToAll,
    /// Sends every token to every rank, which drops tokens of other experts: `T (R - 1)` rows in each direction.
    /// Sends fewer rows than the all-to-all if `k > R`.
    AllGather,
    /// Sends a token once to each rank that has some of its experts. With uniform choices this takes
    /// `T d (R - 1) / R` rows in each direction. `d` are the [`expected_destinations`](super::expected_destinations),
    /// at most the smaller of `k` and `R`. With several nodes, sends a token once to each node.
    Flex,
}

/// Brings tokens to their experts and back. Every rank of expert x expert-tensor has its own tokens.
///
/// The rows of an expert are ordered by source rank, and then by token. If these ranks read consecutive tokens, like
/// the ranks of the data axis, this is the order of the global batch. The gradients of an expert are then
/// bit-identical for every split over the expert axis.
///
/// This holds for all dispatchers except hierarchical dispatchers, which send tokens through other ranks.
pub trait Dispatcher: fmt::Debug + Send + Sync {
    /// Starts the dispatch of tokens with this routing. Ranks exchange the row counts while they compute.
    ///
    /// Collective: call it on all ranks of expert x expert-tensor.
    fn start(&self, routing: &Routing) -> PendingDispatch;
}

/// A dispatch whose row counts are being exchanged.
pub struct PendingDispatch(Box<DispatchFn>);

type DispatchFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched;

impl PendingDispatch {
    /// Creates a dispatch from the closure that [`dispatch`](Self::dispatch) calls with the tokens.
    pub fn new(
        dispatch: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched + 'static,
    ) -> Self {
        Self(Box::new(dispatch))
    }

    /// Sends the tokens `[tokens, hidden]`, and returns the rows of this rank's experts from all ranks. The pending
    /// work of `exchanges` runs once, while rows are exchanged if possible.
    ///
    /// Collective: call it on all ranks of expert x expert-tensor.
    pub fn dispatch(self, x: Tensor<2>, exchanges: &mut Exchanges<'_>) -> Dispatched {
        (self.0)(x, exchanges)
    }
}

impl fmt::Debug for PendingDispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingDispatch")
    }
}

/// Tokens that have arrived at their experts.
pub struct Dispatched {
    /// The rows of this rank's experts.
    pub rows: ExpertRows,
    combine: Box<CombineFn>,
}

/// Sends the results of rows back to the ranks of their tokens.
pub(super) type CombineFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2>;

impl Dispatched {
    /// Creates the rows with a closure for their results `[rows, hidden]`, which are partial sums over the
    /// expert-tensor axis. The closure sends the results back to the ranks of their tokens, and sums the results of
    /// each token.
    pub fn new(
        rows: ExpertRows,
        combine: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2> + 'static,
    ) -> Self {
        let combine = Box::new(combine);
        Self { rows, combine }
    }

    /// Applies the experts. Returns the sums of their results for the tokens of this rank: `[tokens, hidden]`.
    ///
    /// Collective: call it on all ranks of expert x expert-tensor.
    pub fn apply(
        self,
        experts: impl FnOnce(ExpertRows) -> Tensor<2>,
        exchanges: &mut Exchanges<'_>,
    ) -> Tensor<2> {
        (self.combine)(experts(self.rows), exchanges)
    }
}

impl fmt::Debug for Dispatched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispatched")
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

impl DispatcherKind {
    /// Returns the name of the dispatcher in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllGather => "all-gather",
            Self::Flex => "flex",
        }
    }
}
