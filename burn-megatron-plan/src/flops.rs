//! Floating-point operations of training, counted as in published tables.
//!
//! A matrix product counts 2 operations per weight and token in the forward and 4 in the backward. Causal attention
//! counts only the query-key pairs that it computes, not the full square. The following are not counted: embedding
//! lookups, norms, activations, rotary positions, routers, the softmax and the optimizer. Recomputed or replicated work
//! counts once (Narayanan et al. 2021, arXiv:2104.04473, with the causal half as in Megatron-LM's
//! `num_floating_point_operations`).

/// Returns the number of keys per query of causal attention, averaged over a sequence of `seq` tokens.
///
/// Without a window, this is half of the sequence length, as in published tables. A window of `window` tokens includes
/// the token of the query. It counts the exact number of pairs: `window - window (window - 1) / (2 seq)`.
///
/// ```
/// use burn_megatron_plan::flops::keys_per_query;
///
/// assert_eq!(keys_per_query(4096, None), 2048.0);
/// // With a window of 1 token, a query only has its own key.
/// assert_eq!(keys_per_query(4096, Some(1)), 1.0);
/// ```
pub fn keys_per_query(seq: usize, window: Option<usize>) -> f64 {
    let seq = seq as f64;
    match window.map(|window| window as f64) {
        Some(window) if window < seq => window - window * (window - 1.0) / (2.0 * seq),
        _ => seq / 2.0,
    }
}

/// Returns the operations per token of the forward and the backward of a layer's attention: `6 keys (q + v)`.
///
/// `q` is the total width of the query heads, and `v` is the total width of the value heads of these queries. A query
/// attends to `keys` keys [on average](keys_per_query).
pub fn attention_flops_per_token(keys: f64, query_features: usize, value_features: usize) -> f64 {
    6.0 * keys * (query_features as f64 + value_features as f64)
}

/// Returns the operations per token of the forward and the backward of matrix products with `weights` weights.
pub fn product_flops_per_token(weights: f64) -> f64 {
    6.0 * weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_counts_its_pairs() {
        // Queries 0 to 3 of 4 tokens have 1, 2, 2 and 2 keys.
        assert_eq!(keys_per_query(4, Some(2)), 7.0 / 4.0);
        assert_eq!(keys_per_query(4, Some(1)), 1.0);
        for window in [None, Some(4), Some(9)] {
            assert_eq!(keys_per_query(4, window), 2.0);
        }
        let pairs: usize = (0..1000).map(|query: usize| (query + 1).min(77)).sum();
        let keys = keys_per_query(1000, Some(77));
        assert!((keys - pairs as f64 / 1000.0).abs() < 1e-9);
    }

    /// DeepSeek-V3, whose keys and values differ in width: 249.8121 GFLOP per token of 4096.
    #[test]
    fn latent_attention_counts_both_widths() {
        let (hidden, layers) = (7168.0, 61.0);
        // Megatron counts the weights of the two norms of the latents as well.
        let projections = 187_107_328.0;
        let dense = 3.0 * 3.0 * hidden * 18432.0;
        let experts = 58.0 * 9.0 * 3.0 * hidden * 2048.0;
        let weights = layers * projections + dense + experts + hidden * 129_280.0;
        let keys = keys_per_query(4096, None);
        let attention = layers * attention_flops_per_token(keys, 128 * 192, 128 * 128);
        let flops = product_flops_per_token(weights) + attention;
        assert_eq!((flops / 1e5).round() / 1e4, 249.8121);
    }
}
