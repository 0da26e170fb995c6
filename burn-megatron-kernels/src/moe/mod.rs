//! Mixture of experts: the choice of experts, the order of rows by expert, products per expert, and
//! the sums of the auxiliary losses.
//!
//! A layer calls them in this order; `[tokens, hidden]` is cut by rows, and all but the choices and the
//! counts is differentiable:
//!
//! ```text
//! // router: logits [tokens, experts] to choices and weights [tokens, k]; weights in f32 (f64 for f64)
//! RouterOptions { top_k, score: ScoreFunction, scaling_factor: f64, groups: Option<ExpertGroups> }
//! ScoreFunction::{Softmax, PreSoftmax, Sigmoid, SqrtSoftplus}
//! ExpertGroups { groups, chosen, score: GroupScore::{Max, SumOf(n)} }
//! RouterOptions::check(&self, experts: usize) -> Result<(), KernelError>
//! top_k_router(logits: Tensor<2>, options: &RouterOptions, bias: Option<Tensor<1>>)
//!     -> (Tensor<2, Int>, Tensor<2>)
//! router_weights(logits: Tensor<2>, indices: Tensor<2, Int>, options: &RouterOptions) -> Tensor<2>
//!
//! // permutation: rows by expert; an index outside of 0..experts is a dropped pair
//! RowLayout::{Kept, Rows(n), Aligned(multiple), Capacity(rows_per_expert)}
//! RowMap::new(indices: Tensor<2, Int>, experts: usize, layout: RowLayout) -> RowMap
//!     .rows() .group_sizes() -> Vec<usize>                       // on the host
//!     .row_to_token() .row_to_slot() .counts() .offsets() -> Tensor<1, Int>
//!     .slot_to_row() -> Tensor<2, Int>                           // -1: dropped
//! permute(x: Tensor<2>, map: &RowMap) -> Tensor<2>               // [tokens, hidden] to [rows, hidden]
//! permute_weights(weights: Tensor<2>, map: &RowMap) -> Tensor<1> // [tokens, k] to [rows]
//! unpermute(rows: Tensor<2>, map: &RowMap) -> Tensor<2>          // [rows, hidden] to [tokens, hidden]
//!
//! // grouped: group_sizes[e] rows for expert e, one expert after the other; a transposed weight is read in place
//! grouped_matmul(x: Tensor<2>, weights: Tensor<3>, group_sizes: &[usize]) -> Tensor<2>
//! grouped_weight_gradient(x: Tensor<2>, gradient: Tensor<2>, group_sizes: &[usize]) -> Tensor<3>
//! accumulate_grouped_weight_gradient_at(x, gradient, group_sizes, flat: Tensor<1>, offset: usize, add: bool)
//!     -> Tensor<1>
//!
//! // statistics: tokens in `sequences` stretches of equal length; `valid` [tokens] leaves padding out
//! count_experts(indices: Tensor<2, Int>, experts: usize, sequences: usize) -> Tensor<2, Int>
//! sum_scores(logits: Tensor<2>, score: ScoreFunction, sequences: usize, valid: Option<Tensor<1, Bool>>)
//!     -> Tensor<2>                                               // [sequences, experts]
//! load_balancing_loss(score_sums: Tensor<2>, counts: Tensor<2, Int>, top_k: usize) -> Tensor<1>
//! sum_squared_lse(logits: Tensor<2>, valid: Option<Tensor<1, Bool>>) -> Tensor<1> // of the z-loss
//! ```
//!
//! Weights of rows are applied by [`activation`](crate::activation::activate)'s `row_weight`.
