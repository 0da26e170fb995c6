//! Text from a trained model.

use burn::tensor::Tensor;
use burn_megatron_kernels::philox::{Stream, uniform};
use serde::{Deserialize, Serialize};

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

/// Draws bytes after the prompt. `next` gets the last `context` tokens, padded at the end where a
/// causal model does not look, and says what the next one is; the [`Draw`] decides for it.
pub(super) fn generate<E>(
    config: &GenerateConfig,
    context: usize,
    seed: u64,
    mut next: impl FnMut(Vec<i32>, Draw) -> Result<u8, E>,
) -> Result<Vec<u8>, E> {
    let mut text = config.prompt.as_bytes().to_vec();
    if text.is_empty() {
        text.push(b'\n');
    }
    let mut words = vec![0; config.tokens];
    Stream::new(seed, 0).words(0, config.tokens, |i, word| words[i] = word);
    for word in words {
        let seen = text.len().min(context);
        let last = text[text.len() - seen..].iter();
        let mut tokens: Vec<i32> = last.map(|byte| i32::from(*byte)).collect();
        tokens.resize(context, 0);
        let (temperature, point) = (config.temperature, uniform(word));
        text.push(next(
            tokens,
            Draw {
                at: seen - 1,
                temperature,
                point,
            },
        )?);
    }
    Ok(text)
}

/// How the next token is drawn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    at: usize,
    temperature: f64,
    point: f64,
}

impl Draw {
    /// A token from the logits `[1, context, vocabulary]`.
    pub fn token(&self, logits: Tensor<3>) -> u8 {
        let logits = logits.narrow(1, self.at, 1).into_data();
        let logits = logits.iter::<f64>().collect::<Vec<_>>();
        draw(&logits, self.temperature, self.point) as u8
    }
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
