//! What a dispatcher of experts is.

use std::fmt;

use burn::tensor::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::exchange::Exchanges;
use crate::nn::moe::experts::ExpertRows;
use crate::nn::moe::router::Routing;

/// The exchange of tokens with the ranks of their experts.
///
/// `R` ranks of the expert axis exchange the rows of `T` tokens of each rank, with `k` experts per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DispatcherKind {
    /// A token is sent to each of its experts: `T k (R - 1) / R` rows each way.
    AllToAll,
    /// Every token is sent to every rank, and each rank keeps the tokens of its experts: `T (R - 1)` rows each way,
    /// fewer from `k = R` on.
    AllGather,
    /// A token is sent once to each rank that has some of its experts: with uniform choices `T d (R - 1) / R` rows each
    /// way for the [`expected_destinations`](super::expected_destinations) `d`, at most the smaller of `k` and `R`. Over several nodes, once to each node.
    Flex,
}

/// Brings tokens to their experts and back; every rank of expert x expert-tensor has tokens of its own.
///
/// Rows of an expert are in the order of the ranks that they come from, and of their tokens there. So where these
/// ranks read consecutive tokens, as those of the data axis do, the order is that of the global batch, and the
/// gradients of an expert have the same bits in every split over the expert axis.
///
/// This holds for all dispatchers but a hierarchical one, where tokens travel over other ranks.
pub trait Dispatcher: fmt::Debug + Send + Sync {
    /// Starts the dispatch of tokens with this routing: ranks exchange the numbers of rows, while others compute.
    ///
    /// Collective: call on all ranks of expert x expert-tensor.
    fn start(&self, routing: &Routing) -> PendingDispatch;
}

/// A dispatch of which the numbers of rows are under way.
pub struct PendingDispatch(Box<DispatchFn>);

type DispatchFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched;

impl PendingDispatch {
    /// With the function that takes tokens as [`dispatch`](Self::dispatch) does.
    pub fn new(
        dispatch: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Dispatched + 'static,
    ) -> Self {
        Self(Box::new(dispatch))
    }

    /// The rows of this rank's experts, of tokens `[tokens, hidden]` of all ranks. What `exchanges` is to do meanwhile is
    /// done once, while rows are under way if that can be.
    ///
    /// Collective: call on all ranks of expert x expert-tensor.
    pub fn dispatch(self, x: Tensor<2>, exchanges: &mut Exchanges<'_>) -> Dispatched {
        (self.0)(x, exchanges)
    }
}

impl fmt::Debug for PendingDispatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingDispatch")
    }
}

/// Tokens at their experts.
pub struct Dispatched {
    /// The rows of this rank's experts.
    pub rows: ExpertRows,
    combine: Box<CombineFn>,
}

/// Brings the results of rows back to the ranks of their tokens.
pub(super) type CombineFn = dyn FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2>;

impl Dispatched {
    /// With the function that takes the results `[rows, hidden]`, partial sums over the expert-tensor axis, back to
    /// the ranks of their tokens and sums those of each token.
    pub fn new(
        rows: ExpertRows,
        combine: impl FnOnce(Tensor<2>, &mut Exchanges<'_>) -> Tensor<2> + 'static,
    ) -> Self {
        let combine = Box::new(combine);
        Self { rows, combine }
    }

    /// Applies the experts, and returns the sums of their results for the tokens of this rank:
    /// `[tokens, hidden]`.
    ///
    /// Collective: call on all ranks of expert x expert-tensor.
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
    /// Its name in a recipe.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllToAll => "all-to-all",
            Self::AllGather => "all-gather",
            Self::Flex => "flex",
        }
    }
}
