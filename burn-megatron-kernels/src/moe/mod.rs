//! Mixture of experts: the choice of experts, the order of rows by expert, products per expert, and
//! the sums of the auxiliary losses.
//!
//! For tokens `[T, h]`, `E` experts and `k` choices of each token, a layer calls
//!
//! | operation | from | to |
//! |---|---|---|
//! | [`router::top_k_router`] | logits `[T, E]` | indices and weights `[T, k]` |
//! | [`capacity::keep_within_capacity`] | indices and weights | the indices of those that are not dropped |
//! | [`destinations::destinations`] | indices | the ranks that each token is sent to, each once |
//! | [`permutation::RowMap`] | indices | which row each pair of a token and a choice has |
//! | [`permutation::permute`] | `[T, h]` | rows by expert `[N, h]` |
//! | [`permutation::permute_weights`] | weights `[T, k]` | those of the rows, `[N]` |
//! | [`permutation::permute_words`] | two tensors of words of each token, such as codes and scales | those of the rows |
//! | [`grouped::grouped_matmul`] | rows `[N, in]`, weights `[E, in, out]` | `[N, out]` |
//! | [`activation::activate`](crate::activation::activate) | `[N, 2 f]`, weights of the rows | `[N, f]` |
//! | [`permutation::unpermute`] | `[N, h]` | `[T, h]`: the sum of the rows of each token |
//!
//! and adds losses of sums that [`statistics`] has. All but choices and counts is differentiable.

pub mod capacity;
pub mod destinations;
pub mod grouped;
pub mod permutation;
pub mod router;
mod score;
pub mod statistics;
