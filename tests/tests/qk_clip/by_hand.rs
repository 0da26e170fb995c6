//! Computes the largest attention logits of a GPT with loops.

use burn_megatron_data::Batch;
use burn_megatron_models::TransformerConfig;

use super::Steps;

/// A GPT of one layer with two groups of keys, computed with loops.
pub struct ByHand<'a> {
    pub steps: &'a Steps,
    pub at: usize,
    pub model: &'a TransformerConfig,
}

impl ByHand<'_> {
    fn parameter(&self, path: &str) -> &[f64] {
        let index = self.steps.paths.iter().position(|own| own == path);
        &self.steps.parameters[self.at][index.unwrap_or_else(|| panic!("no {path}"))]
    }

    /// Returns the queries and keys of a token: all query heads, then the key groups.
    fn projected(&self, token: usize, position: usize) -> Vec<f64> {
        let hidden = self.model.hidden;
        let (embedding, positions) = (
            self.parameter("embedding.weight"),
            self.parameter("positions.weight"),
        );
        let x: Vec<f64> = (0..hidden)
            .map(|i| embedding[token * hidden + i] + positions[position * hidden + i])
            .collect();
        let mean = x.iter().sum::<f64>() / hidden as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / hidden as f64;
        let scale = 1.0 / (variance + self.model.norm_epsilon).sqrt();
        let norm = |name: &str| self.parameter(&format!("blocks.0.attention_norm.{name}"));
        let (weight, bias) = (norm("weight"), norm("bias"));
        let x: Vec<f64> = (0..hidden)
            .map(|i| (x[i] - mean) * scale * weight[i] + bias[i])
            .collect();
        let (weight, bias) = (
            self.parameter("blocks.0.attention.qkv.weight"),
            self.parameter("blocks.0.attention.qkv.bias"),
        );
        let columns = bias.len();
        let column = |c: usize| {
            let products = (0..hidden).map(|i| x[i] * weight[i * columns + c]);
            products.sum::<f64>() + bias[c]
        };
        (0..columns).map(column).collect()
    }

    /// Returns the largest logit of each head.
    pub fn largest(&self, batch: &Batch) -> Vec<f64> {
        let (heads, groups) = (self.model.heads, self.model.groups.unwrap());
        let width = self.model.hidden / heads;
        let mut largest = vec![f64::NEG_INFINITY; heads];
        for row in batch.tokens().chunks(batch.seq) {
            let tokens = row.iter().enumerate();
            let all: Vec<_> = tokens
                .map(|(position, token)| self.projected(*token as usize, position))
                .collect();
            for query in 0..row.len() {
                for key in 0..=query {
                    for (head, largest) in largest.iter_mut().enumerate() {
                        let q = &all[query][head * width..][..width];
                        let k = &all[key][(heads + head / (heads / groups)) * width..][..width];
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| q * k).sum();
                        *largest = largest.max(dot / (width as f64).sqrt());
                    }
                }
            }
        }
        largest
    }
}
