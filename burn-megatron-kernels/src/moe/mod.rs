//! Mixture of experts: router, token permutation, grouped GEMM, and the sums for the auxiliary losses.
//!
//! A mixture-of-experts layer calls these operations. It has `T` tokens of width `h`, `E` experts and `k` chosen
//! experts per token:
//!
//! | operation | input | output |
//! |---|---|---|
//! | [`router::top_k_router`] | logits `[T, E]` | indices and weights `[T, k]` |
//! | [`capacity::keep_within_capacity`] | indices and weights | indices, with -1 for dropped pairs |
//! | [`destinations::destinations`] | indices | the destination ranks of each token |
//! | [`permutation::RowMap`] | indices | the row of each pair of a token and a chosen expert |
//! | [`permutation::permute`] | tokens `[T, h]` | rows sorted by expert `[N, h]` |
//! | [`permutation::permute_weights`] | weights `[T, k]` | weights of the rows `[N]` |
//! | [`permutation::permute_words`] | two integer tensors, such as FP8 codes and scales | integers of the rows |
//! | [`grouped::grouped_matmul`] | rows `[N, in]`, weights `[E, in, out]` | `[N, out]` |
//! | [`activation::activate`](crate::activation::activate) | `[N, 2 f]`, weights of the rows | `[N, f]` |
//! | [`permutation::unpermute`] | `[N, h]` | `[T, h]`: the sum of the rows of each token |
//!
//! The layer also adds auxiliary losses, which are computed from the sums of [`statistics`]. The operations are
//! differentiable, except for the choice of experts, the counts and the integer tensors.

pub mod capacity;
pub mod destinations;
pub mod grouped;
pub mod permutation;
pub mod router;
mod score;
pub mod statistics;
