//! Generates text on one rank.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::philox::{Stream, uniform};

use super::stop::StopStringFilter;
use super::{GenerateConfig, GenerateError};
use crate::comm::{CommError, ParallelContext};
use crate::model::{GenerationCache, LanguageModel};
use crate::pipeline::engine::forward_only;
use crate::tokenizer::Tokenizer;

/// Prefill reads a long prompt in chunks of this many tokens for each rank, to bound the memory of activations.
const PREFILL_CHUNK: usize = 512;

/// Generates text with this rank's part of a model. Every method is collective: call it on all ranks of the
/// tensor, pipeline and context groups with the same arguments; each gets the same text.
///
/// Ranks of a context group read a prompt together: each its part of a chunk, whose keys and values it keeps
/// ([`KvCache`](crate::nn::KvCache)).
#[derive(Debug)]
pub struct Generator<'a, M: LanguageModel> {
    model: &'a M,
    groups: &'a ParallelContext,
    device: Device,
    /// The pipeline rank of each stage.
    placement: Vec<usize>,
    use_cache: bool,
    cache: M::Cache,
    /// The tokens in the cache, including padding.
    cached: Vec<u32>,
}

/// The result of generation.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOutput {
    /// The text after the prompt, without the stop string.
    pub text: String,
    /// The new tokens, including the one that ended the text.
    pub tokens: Vec<u32>,
    /// Why generation ended.
    pub finish_reason: FinishReason,
    /// The number of tokens of the prompt.
    pub prompt: usize,
    /// The time until the first new token.
    pub prefill: Duration,
    /// The time from the first to the last new token.
    pub decode: Duration,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The maximum number of new tokens was reached.
    Length,
    /// A stop string was found.
    Stop,
    /// A stop token was generated.
    Token,
}

/// Which tokens a rank of a context group reads.
#[derive(Clone, Copy, Debug)]
enum Reading {
    /// Those of its part.
    Prefill,
    /// All.
    Whole,
}

impl<'a, M: LanguageModel> Generator<'a, M> {
    /// A generator with one stage per pipeline rank, in order.
    pub fn new(model: &'a M, groups: &'a ParallelContext, device: &Device) -> Self {
        Self {
            model,
            groups,
            device: device.clone().inner(),
            placement: (0..groups.pipeline().size()).collect(),
            use_cache: true,
            cache: M::Cache::new(model).over_context(groups.context()),
            cached: vec![],
        }
    }

    /// Places stage `s` on rank `placement[s]` of the pipeline.
    pub fn with_placement(mut self, placement: Vec<usize>) -> Self {
        self.placement = placement;
        self
    }

    /// Disables the cache: the whole text is read again for each new token.
    pub fn without_cache(mut self) -> Self {
        self.use_cache = false;
        self
    }

    /// The bytes of this rank's [cache](LanguageModel::Cache).
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Generates text after the tokens of a prompt. `on_text` gets the text incrementally, in whole characters.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] for invalid settings, a prompt of another model, logits that are not finite, and
    /// failed collectives.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<GenerationOutput, GenerateError> {
        config.check()?;
        let mut until = StopStringFilter::new(&config.stop);
        let mut characters = tokenizer.stream();
        for token in prompt {
            // The text of a token may depend on the ones before it.
            characters.push(*token)?;
        }
        let draws = Stream::new(config.seed.unwrap_or(0), 0);
        let mut tokens = prompt.to_vec();
        let (mut text, mut finish_reason) = (String::new(), FinishReason::Length);
        let (started, mut prefill) = (Instant::now(), Duration::ZERO);
        for number in 0..config.tokens {
            let token = self.next(&tokens, |logits| {
                let mut point = 0.0;
                draws.words(number as u64, 1, |_, word| point = uniform(word));
                config.draw(logits, point)
            })?;
            if number == 0 {
                prefill = started.elapsed();
            }
            tokens.push(token);
            if tokenizer.special().stop_tokens.contains(&token) {
                finish_reason = FinishReason::Token;
                break;
            }
            let new = until.push(&characters.push(token)?);
            on_text(&new)?;
            text.push_str(&new);
            if until.is_stopped() {
                finish_reason = FinishReason::Stop;
                break;
            }
        }
        if finish_reason != FinishReason::Stop {
            let mut rest = until.push(&characters.finish()?);
            rest.push_str(&until.finish());
            on_text(&rest)?;
            text.push_str(&rest);
        }
        Ok(GenerationOutput {
            text,
            finish_reason,
            prompt: prompt.len(),
            tokens: tokens.split_off(prompt.len()),
            prefill,
            decode: started.elapsed() - prefill,
        })
    }

    /// The logits of the next token, on the pipeline ranks that have the last stage; `None` on others. If there
    /// are more tokens than the model's context, only the last ones are read.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] for no tokens, a token beyond the vocabulary, and failed collectives.
    pub fn logits_after(&mut self, tokens: &[u32]) -> Result<Option<Vec<f64>>, GenerateError> {
        let vocabulary = self.model.vocabulary();
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            let token = *token;
            return Err(GenerateError::Vocabulary { token, vocabulary });
        }
        let seen = &tokens[tokens.len().saturating_sub(self.model.context())..];
        let Some(at) = seen.len().checked_sub(1) else {
            return Err(GenerateError::NoPrompt);
        };
        // The last token is in a call of its own, and only that call's logits are used.
        let multiple = self.model.sequence_multiple();
        let last_start = at / multiple * multiple;
        let begin = self.cached_prefix(seen).min(last_start) / multiple * multiple;
        self.cached.truncate(begin);
        // What the ranks of a context group cannot divide, each of them reads.
        let ranks = self.cache.prefill_multiple();
        let divided = (last_start - begin) / (ranks * multiple) * (ranks * multiple);
        let (divided, rest) = seen[begin..last_start].split_at(divided);
        for chunk in divided.chunks(PREFILL_CHUNK.next_multiple_of(multiple) * ranks) {
            self.forward(chunk, Reading::Prefill)?;
        }
        if !rest.is_empty() {
            self.forward(rest, Reading::Whole)?;
        }
        let mut ids = seen[last_start..].to_vec();
        ids.resize(multiple, 0);
        let hidden = self.forward(&ids, Reading::Whole)?;
        Ok(hidden.map(|hidden| {
            let logits = self.model.logits_of(hidden);
            // The cache returns the last tokens, at least those of this call.
            let first = logits.dims()[1] - multiple;
            let logits = logits.narrow(1, first + at - last_start, 1);
            logits.into_data().iter::<f64>().collect()
        }))
    }

    /// The token that `pick` chooses, on every rank.
    fn next(
        &mut self,
        tokens: &[u32],
        pick: impl FnOnce(&[f64]) -> Option<usize>,
    ) -> Result<u32, GenerateError> {
        let logits = self.logits_after(tokens)?;
        let own = logits
            .and_then(|logits| pick(&logits))
            .map_or(-1, |token| token as i64);
        // The rank with the last stage broadcasts the token.
        let last = self.placement.last().copied().unwrap_or(0);
        let pipeline = self.groups.pipeline();
        let token = pipeline.broadcast_scalar(own, last)?;
        let token = self.groups.context().broadcast_scalar(token, 0)?;
        let after = tokens.len();
        u32::try_from(token).map_err(|_| GenerateError::Logits { after })
    }

    /// The length of the common prefix of the cache and a text.
    fn cached_prefix(&self, seen: &[u32]) -> usize {
        let same = self.cached.iter().zip(seen).take_while(|(a, b)| a == b);
        if self.use_cache { same.count() } else { 0 }
    }

    /// Runs the model on more tokens.
    fn forward(&mut self, ids: &[u32], reading: Reading) -> Result<Option<Tensor<3>>, CommError> {
        self.cache.set_len(self.cached.len());
        let (model, cache) = (self.model, &mut self.cache);
        let values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let data = TensorData::new(values, [1, ids.len()]);
        let tokens = Tensor::<2, Int>::from_data(data, &self.device);
        let pipeline = self.groups.pipeline();
        let hidden = forward_only(&self.placement, pipeline, &self.device, |stage, input| {
            let ids = tokens.clone();
            match reading {
                Reading::Prefill => cache.prefill(model, stage, input, ids),
                Reading::Whole => cache.hidden(model, stage, input, ids),
            }
        })?;
        self.cached.extend(ids);
        Ok(hidden)
    }
}
