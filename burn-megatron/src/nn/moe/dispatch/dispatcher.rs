//! The interface of token dispatchers for MoE layers.

use std::fmt;

use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::exchange::Exchanges;
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The kind of token dispatcher, which sends tokens to the ranks that hold their experts.
///
/// The volumes below are for `R` ranks on the expert axis, with `T` tokens per rank and `k` experts per token. A row
/// contains the features of one token. Rows are sent in two directions: tokens to the experts, and results back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DispatcherKind {
    /// Sends each token once per expert to the rank of the expert. Each rank sends `T k (R - 1) / R` rows in each
    /// direction.
    AllToAll,
    /// Sends every token to every rank. Each rank ignores the tokens that chose none of its experts, and sends
    /// `T (R - 1)` rows in each direction. If `k > R`, this is fewer rows than with the all-to-all.
    AllGather,
    /// Sends each token once to each rank that holds at least one of its experts. If experts are chosen uniformly, each
    /// rank sends `T d (R - 1) / R` rows in each direction. `d` is the mean number of destination ranks of a token
    /// ([`expected_destinations`](super::expected_destinations)), which is at most the smaller of `k` and `R`. With
    /// several nodes, each token is sent at most once to each other node.
    Flex,
}

/// A token dispatcher, which sends tokens to the ranks of their experts and returns the results. Each rank on the
/// expert and expert-tensor axes has different tokens.
///
/// The rows that arrive at an expert are ordered by source rank, and then by token. If the ranks hold consecutive
/// tokens, like the ranks of the data axis, this is the order of the global batch. The gradients of an expert are then
/// bit-identical for every size of the expert axis.
///
/// Hierarchical dispatchers are an exception to this order, because they forward tokens through other ranks.
pub trait Dispatcher: fmt::Debug + Send + Sync {
    /// Starts the dispatch of the tokens of `routing`. Ranks exchange their row counts in the background.
    ///
    /// This call is collective: make it on all ranks of the expert and expert-tensor axes.
    fn start(&self, routing: &Routing) -> PendingDispatch;
}

/// A dispatch that has been started. The ranks exchange their row counts in the background.
pub struct PendingDispatch(Box<DispatchFn>);

type DispatchFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched;

impl PendingDispatch {
    /// Creates a pending dispatch from a closure. [`dispatch`](Self::dispatch) calls the closure with the tokens.
    pub fn new(
        dispatch: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched + 'static,
    ) -> Self {
        Self(Box::new(dispatch))
    }

    /// Sends the tokens `[tokens, hidden]` to the ranks of their experts. Returns the rows that all ranks sent to this
    /// rank's experts. The pending work of `exchanges` is run once, and overlaps with the exchange of rows if possible.
    ///
    /// This call is collective: make it on all ranks of the expert and expert-tensor axes.
    pub fn dispatch(self, x: Tensor<2>, exchanges: &mut Exchanges<'_>) -> Dispatched {
        (self.0)(x, exchanges)
    }
}

impl fmt::Debug for PendingDispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingDispatch")
    }
}

/// The rows of tokens that have arrived at the experts of this rank.
pub struct Dispatched {
    /// The rows of this rank's experts.
    pub rows: ExpertRows,
    combine: Box<CombineFn>,
}

/// A closure that sends the results of rows back to the ranks of their tokens.
pub(super) type CombineFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2>;

impl Dispatched {
    /// Creates the dispatched tokens from the rows and a `combine` closure. The closure gets the results
    /// `[rows, hidden]`, which are partial sums over the expert-tensor axis. It sends the results back to the ranks of
    /// their tokens, and sums the results of each token.
    pub fn new(
        rows: ExpertRows,
        combine: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2> + 'static,
    ) -> Self {
        let combine = Box::new(combine);
        Self { rows, combine }
    }

    /// Applies the experts to the rows, and sends the results back. Returns the sum of the expert results for each
    /// token of this rank: `[tokens, hidden]`.
    ///
    /// This call is collective: make it on all ranks of the expert and expert-tensor axes.
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
    /// Returns the name of the dispatcher, as it is written in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllGather => "all-gather",
            Self::Flex => "flex",
        }
    }
}
