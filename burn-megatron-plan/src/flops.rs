//! Counts the floating-point operations (FLOPs) of training, in the same way as published tables.
//!
//! A matrix multiplication has 2 FLOPs per weight and token in the forward, and 4 in the backward. For causal
//! attention, only the query-key pairs that the causal mask keeps are counted. The following are not counted: embedding
//! lookups, norms, activation functions, rotary position embeddings, routers, the softmax and the optimizer. Work that
//! is recomputed or replicated is counted once. The formulas are from Narayanan et al. 2021, arXiv:2104.04473, but
//! count only half of the attention matrix, as `num_floating_point_operations` of Megatron-LM does.

/// Returns the average number of keys per query of causal attention, over a sequence of `seq` tokens.
///
/// Without a sliding window, the result is half of the sequence length, as in published tables. With a sliding window
/// of `window` tokens, which includes the query token, the result is the exact average: `window - window (window - 1) /
/// (2 seq)`.
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

/// Returns the FLOPs per token of the attention of a layer, for the forward and the backward: `6 keys (q + v)`.
///
/// `q` is `query_features`, the sum of the widths of all query heads. `v` is `value_features`, the sum of the value
/// head widths over all query heads. `keys` is the [average number of keys](keys_per_query) that a query attends to.
pub fn attention_flops_per_token(keys: f64, query_features: usize, value_features: usize) -> f64 {
    6.0 * keys * (query_features as f64 + value_features as f64)
}

/// Returns the FLOPs per token of matrix multiplications with `weights` weights, for the forward and the backward: `6
/// weights`.
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

    /// DeepSeek-V3, whose keys and values have different widths, has 249.8121 GFLOP per token in sequences of 4096
    /// tokens.
    #[test]
    fn latent_attention_counts_both_widths() {
        let (hidden, layers) = (7168.0, 61.0);
        // Megatron-LM also counts the weights of the two norms of the latents.
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
