//! Mixture of experts (MoE): each token is processed by `k` of `E` experts, which a router selects.
//!
//! [`MoeMlp`] replaces a [`ParallelMlp`](super::ParallelMlp). It consists of
//!
//! - a [`Router`] on every rank, which computes the scores, the chosen experts and their weights for the tokens of the
//!   rank;
//! - [`Experts`], which are split over the expert axis of the [expert grid](crate::mesh::Grid::Expert). Each expert is
//!   also split over the expert-tensor axis;
//! - a [`Dispatcher`], which sends tokens to the ranks of their experts and returns the results;
//! - optionally a [`Capacity`], above which an expert drops tokens;
//! - optionally [`SharedExperts`], which process every token;
//! - optionally a [`RouterLoss`] or an [`ExpertBias`], which balances the load of the experts.
//!
//! [`RoutedTokens`] marks padding, which routers ignore. A training step passes a [`RouterStep`] to each forward pass,
//! and calls [`Routers::end_step`] at the end.
//!
//! With the experts `E_i` and the weights `p` of the chosen experts, the output of a token is
//! `sum over i of p_i E_i(x)`. Gradients of experts are summed only over the data axis of the expert grid, because an
//! expert has already processed the tokens of all expert ranks. Gradients of the router are summed over the same axes
//! as the gradients of a norm.
//!
//! The formulas follow Megatron-LM, Mixtral (arXiv:2401.04088) and DeepSeek-V3 (arXiv:2412.19437).

mod bias;
mod capacity;
mod choice;
mod dispatch;
mod expert_product;
mod experts;
mod loss_kind;
mod losses;
mod mlp;
mod routed_tokens;
mod router;
mod routers;
mod shared;
mod step;
#[cfg(test)]
mod tests;
mod token_part;

pub use bias::ExpertBias;
pub use capacity::{Capacity, KeepPolicy};
pub use choice::RouterChoice;
pub use dispatch::{
    DispatchNodes, DispatchProblem, DispatchVolume, Dispatched, Dispatcher, DispatcherKind,
    Exchanges, Fp8DispatchScales, PendingDispatch, expected_destinations,
};
pub use experts::{ExpertRows, Experts, ExpertsConfig};
pub use loss_kind::RouterLossKind;
pub use losses::RouterLoss;
pub use mlp::{MoeForward, MoeMlp, MoeMlpConfig};
pub use routed_tokens::RoutedTokens;
pub(in crate::nn) use routed_tokens::TokenPositions;
pub use router::{
    ExpertGroups, GroupScore, Router, RouterConfig, RouterDType, Routing, ScoreFunction,
};
pub use routers::{ReportedLayer, Routers, reduced_reports};
pub use shared::{SharedExperts, SharedExpertsConfig};
pub use step::{RankLoad, RouterStep};
