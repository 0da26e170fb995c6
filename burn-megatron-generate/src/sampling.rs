//! The sampling of a token from its logits.

use std::cmp::Reverse;

use super::GenerateConfig;

/// Returns an integer that sorts in the same order as the weight. The weight must not be negative.
fn order(weight: f64) -> u64 {
    weight.to_bits()
}

/// Returns the largest logit. Returns `None` if the largest logit is not finite or if a logit is NaN.
fn largest(logits: &[f64]) -> Option<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (max.is_finite() && !logits.iter().any(|logit| logit.is_nan())).then_some(max)
}

impl GenerateConfig {
    /// Returns the sampling probability of each token. Returns `None` if a logit is NaN or the largest logit is
    /// infinite.
    ///
    /// The probabilities are `softmax(logits / temperature)`. `top_k` and then `top_p` set the probability of less
    /// likely tokens to 0. If tokens are equally likely, the token with the lower id has precedence.
    ///
    /// ```
    /// use burn_megatron_generate::GenerateConfig;
    ///
    /// let config = GenerateConfig { temperature: 1.0, top_k: Some(2), ..GenerateConfig::default() };
    /// let probabilities = config.probabilities(&[3f64.ln(), 0.0, -1.0]).unwrap();
    /// assert!((probabilities[0] - 0.75).abs() < 1e-12);
    /// assert_eq!(probabilities[2], 0.0);
    /// assert!(config.probabilities(&[f64::NAN, 0.0]).is_none());
    /// ```
    pub fn probabilities(&self, logits: &[f64]) -> Option<Vec<f64>> {
        let mut weights = self.weights(logits)?;
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
        Some(weights)
    }

    /// Returns the first token at which the cumulative probability exceeds `point`, a number in (0, 1). Returns `None`
    /// in the same cases as [`probabilities`](Self::probabilities).
    pub(super) fn draw(&self, logits: &[f64], point: f64) -> Option<usize> {
        let max = largest(logits)?;
        if self.temperature == 0.0 {
            return logits.iter().position(|logit| *logit == max);
        }
        let weights = self.weights(logits)?;
        let mut left = point * weights.iter().sum::<f64>();
        let passed = weights.iter().position(|weight| {
            left -= weight;
            left < 0.0
        });
        passed.or_else(|| weights.iter().rposition(|weight| *weight > 0.0))
    }

    /// Returns the unnormalized probabilities.
    fn weights(&self, logits: &[f64]) -> Option<Vec<f64>> {
        let max = largest(logits)?;
        if self.temperature == 0.0 {
            let first = logits.iter().position(|logit| *logit == max)?;
            let weight = |token| if token == first { 1.0 } else { 0.0 };
            return Some((0..logits.len()).map(weight).collect());
        }
        let weight = |logit: &f64| ((logit - max) / self.temperature).exp();
        let mut weights: Vec<f64> = logits.iter().map(weight).collect();
        if self.top_k.is_some() || self.top_p.is_some() {
            self.keep_likeliest(&mut weights);
        }
        Some(weights)
    }

    /// Sets the weights of the tokens that `top_k` and `top_p` exclude to 0.
    fn keep_likeliest(&self, weights: &mut [f64]) {
        let mut tokens: Vec<usize> = (0..weights.len()).collect();
        tokens.sort_unstable_by_key(|token| (Reverse(order(weights[*token])), *token));
        let k = self.top_k.unwrap_or(tokens.len()).min(tokens.len());
        let enough = self.top_p.map(|p| {
            let sum: f64 = tokens[..k].iter().map(|token| weights[*token]).sum();
            p * sum
        });
        let mut reached = 0.0;
        let kept = tokens[..k]
            .iter()
            .take_while(|token| {
                let more = enough.is_none_or(|enough| reached < enough);
                reached += weights[**token];
                more
            })
            .count();
        tokens[kept..]
            .iter()
            .for_each(|token| weights[*token] = 0.0);
    }
}
