//! Text from a trained model.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::philox::{Stream, uniform};
use serde::{Deserialize, Serialize};

use super::LanguageModel;

/// How text is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GenerateConfig {
    /// What the text begins with.
    pub prompt: String,
    /// How many tokens to draw; 0 draws none.
    pub tokens: usize,
    /// Logits are divided by it: below 1 likelier tokens become likelier still.
    pub temperature: f64,
}

impl Default for GenerateConfig {
    fn default() -> Self {
        Self {
            prompt: "pub fn ".into(),
            tokens: 200,
            temperature: 0.7,
        }
    }
}

/// Draws bytes after the prompt, one forward each; every rank of the tensor axis must come, and all
/// draw the same.
///
/// The model sees the last `context` tokens, padded at the end: a causal model does not look there.
pub fn generate<M: LanguageModel>(
    model: &M,
    device: &Device,
    config: &GenerateConfig,
    seed: u64,
) -> Vec<u8> {
    let context = model.context();
    let mut text = config.prompt.as_bytes().to_vec();
    if text.is_empty() {
        text.push(b'\n');
    }
    let device = device.clone().inner();
    let mut words = vec![0; config.tokens];
    Stream::new(seed, 0).words(0, config.tokens, |i, word| words[i] = word);
    for word in words {
        let seen = text.len().min(context);
        let mut tokens: Vec<i32> = text[text.len() - seen..]
            .iter()
            .map(|byte| i32::from(*byte))
            .collect();
        tokens.resize(context, 0);
        let tokens = TensorData::new(tokens, [1, context]);
        let logits = model.logits(Tensor::<2, Int>::from_data(tokens, &device));
        let logits = logits.narrow(1, seen - 1, 1).into_data();
        let logits = logits.iter::<f64>().collect::<Vec<_>>();
        text.push(draw(&logits, config.temperature, uniform(word)) as u8);
    }
    text
}

/// The token at which the cumulated probability passes `point` in (0, 1).
fn draw(logits: &[f64], temperature: f64, point: f64) -> usize {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits
        .iter()
        .map(|x| ((x - max) / temperature).exp())
        .collect();
    let mut left = point * weights.iter().sum::<f64>();
    let passed = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    passed.unwrap_or(logits.len() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln()];
        let at = |point| draw(&logits, 1.0, point);
        assert_eq!(
            [at(0.01), at(0.49), at(0.51), at(0.74), at(0.76), at(0.999)],
            [0, 0, 1, 1, 2, 2]
        );
    }

    #[test]
    fn a_low_temperature_takes_the_likeliest() {
        assert!((1..100).all(|i| draw(&[1.0, 3.0, 2.0], 0.01, i as f64 / 100.0) == 1));
    }
}
