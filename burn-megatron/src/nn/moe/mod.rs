//! Mixture of experts: each token is computed by `k` of `E` experts, which a router chooses.
//!
//! [`MoeMlp`] takes the place of a [`ParallelMlp`](super::ParallelMlp). It is made of
//!
//! - a [`Router`], which every rank has: scores, choice and weights of the experts of its own tokens;
//! - [`Experts`], split over the expert axis of the [expert grid](crate::mesh::Grid::Expert), and each over its
//!   expert-tensor axis;
//! - a [`Dispatcher`] that brings tokens to their experts and back;
//! - optionally a [`Capacity`], above which an expert drops tokens, [`SharedExperts`] for every token, and a
//!   [`RouterLoss`] or an [`ExpertBias`] that keeps the load even.
//!
//! [`RoutedTokens`] marks padding, which routers leave out. A training step passes a [`RouterStep`] through the forward.
//! [`Routers`] ends the step.
//!
//! With the experts `E_i` and the weights `p` of the chosen ones, the output of a token is
//! `sum over i of p_i E_i(x)`. Gradients of experts are summed over the data axis of their grid alone: an expert
//! has seen the tokens of all expert ranks. Those of the router are summed as a norm's are.
//!
//! Formulas are those of Megatron-LM, Mixtral (arXiv:2401.04088) and DeepSeek-V3 (arXiv:2412.19437).

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
