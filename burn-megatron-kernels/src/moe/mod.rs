//! Mixture of experts: the choice of experts, the order of rows by expert, products per expert, and
//! the sums of the auxiliary losses.
//!
//! With `T` tokens of width `h`, `E` experts and `k` choices per token, a layer calls
//!
//! | operation | input | output |
//! |---|---|---|
//! | [`router::top_k_router`] | logits `[T, E]` | indices and weights `[T, k]` |
//! | [`capacity::keep_within_capacity`] | indices and weights | the indices that are not dropped |
//! | [`destinations::destinations`] | indices | the destination ranks of each token |
//! | [`permutation::RowMap`] | indices | the row of each pair of a token and a choice |
//! | [`permutation::permute`] | `[T, h]` | rows by expert `[N, h]` |
//! | [`permutation::permute_weights`] | weights `[T, k]` | weights of the rows `[N]` |
//! | [`permutation::permute_words`] | two word tensors per token, such as codes and scales | words of the rows |
//! | [`grouped::grouped_matmul`] | rows `[N, in]`, weights `[E, in, out]` | `[N, out]` |
//! | [`activation::activate`](crate::activation::activate) | `[N, 2 f]`, weights of the rows | `[N, f]` |
//! | [`permutation::unpermute`] | `[N, h]` | `[T, h]`: the sum of the rows of each token |
//!
//! and adds auxiliary losses computed from the sums of [`statistics`]. Everything except choices
//! and counts is differentiable.

pub mod capacity;
pub mod destinations;
pub mod grouped;
pub mod permutation;
pub mod router;
mod score;
pub mod statistics;
