//! One rank of a model that writes.

use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::philox::{Stream, uniform};

use super::stop::UntilStop;
use super::{GenerateConfig, GenerateError};
use crate::comm::{Buffer, CommError, Groups};
use crate::model::LanguageModel;
use crate::nn::KvCache;
use crate::pipeline::engine::forward_only;
use crate::tokenizer::Tokenizer;

/// Tokens that are read at once, so that a long prompt needs no memory for all of its activations.
const CHUNK: usize = 512;

/// Writes text with this rank's part of a model. All ranks of the tensor and of the pipeline axis must
/// make the same calls; each gets the same text.
#[derive(Debug)]
pub struct Generator<'a, M> {
    model: &'a M,
    groups: &'a Groups,
    device: Device,
    /// The rank of the pipeline that has each stage.
    placement: Vec<usize>,
    keeps: bool,
    cache: KvCache,
    /// The tokens in the cache, those among them that filled up a piece.
    read: Vec<u32>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The text after the prompt, without what ended it.
    pub text: String,
    /// The tokens that were drawn, the one that ended the text among them.
    pub tokens: Vec<u32>,
    /// Why there are no more.
    pub end: End,
    /// The tokens of the prompt.
    pub prompt: usize,
    /// Until the first token was drawn.
    pub prefill: Duration,
    /// From there to the last.
    pub decode: Duration,
}

/// Why a text is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It has as many tokens as were asked for.
    Length,
    /// A text that stops it has come.
    Stop,
    /// A token that ends texts has come.
    Token,
}

impl<'a, M: LanguageModel> Generator<'a, M> {
    /// A generator whose stages lie on the ranks of the pipeline in order, one on each.
    pub fn new(model: &'a M, groups: &'a Groups, device: &Device) -> Self {
        Self {
            model,
            groups,
            device: device.clone().inner(),
            placement: (0..groups.pipeline().size()).collect(),
            keeps: true,
            cache: model.cache(),
            read: vec![],
        }
    }

    /// The same where stage `s` lies on rank `placement[s]` of the pipeline.
    pub fn with_placement(mut self, placement: Vec<usize>) -> Self {
        self.placement = placement;
        self
    }

    /// The same without what it has read before: every token is read again for each new one.
    pub fn without_cache(mut self) -> Self {
        self.keeps = false;
        self
    }

    /// The bytes of keys and values that this rank holds.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Writes after the tokens of a prompt. `on_text` gets the text as it comes, in whole characters.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] for settings that draw nothing, a prompt that is not of this model, logits that
    /// are not numbers, and missing ranks.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: &mut dyn FnMut(&str) -> std::io::Result<()>,
    ) -> Result<Generated, GenerateError> {
        config.check()?;
        let mut until = UntilStop::new(&config.stop);
        let mut characters = tokenizer.stream();
        for token in prompt {
            // The text of a token can depend on those before it.
            characters.push(*token)?;
        }
        let draws = Stream::new(config.seed.unwrap_or(0), 0);
        let mut tokens = prompt.to_vec();
        let (mut text, mut end) = (String::new(), End::Length);
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
            if tokenizer.special().ends.contains(&token) {
                end = End::Token;
                break;
            }
            let new = until.push(&characters.push(token)?);
            on_text(&new)?;
            text.push_str(&new);
            if until.is_stopped() {
                end = End::Stop;
                break;
            }
        }
        if end != End::Stop {
            let mut rest = until.push(&characters.finish()?);
            rest.push_str(&until.finish());
            on_text(&rest)?;
            text.push_str(&rest);
        }
        Ok(Generated {
            text,
            end,
            prompt: prompt.len(),
            tokens: tokens.split_off(prompt.len()),
            prefill,
            decode: started.elapsed() - prefill,
        })
    }

    /// The logits of what follows the tokens, on the ranks of the pipeline that have the last stage. Of
    /// more tokens than the model's context the last ones are read.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] without a token, for one that the model does not know, and for missing ranks.
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
        // The last token is read in a piece of its own, and of nothing else there are logits.
        let multiple = self.model.sequence_multiple();
        let piece = at / multiple * multiple;
        let begin = self.known(seen).min(piece) / multiple * multiple;
        self.read.truncate(begin);
        for chunk in seen[begin..piece].chunks(CHUNK.next_multiple_of(multiple)) {
            self.forward(chunk)?;
        }
        let mut ids = seen[piece..].to_vec();
        ids.resize(multiple, 0);
        let hidden = self.forward(&ids)?;
        Ok(hidden.map(|hidden| {
            let logits = self.model.logits_of(hidden).narrow(1, at - piece, 1);
            logits.into_data().iter::<f64>().collect()
        }))
    }

    /// The token that `pick` takes, on every rank.
    fn next(
        &mut self,
        tokens: &[u32],
        pick: impl FnOnce(&[f64]) -> Option<usize>,
    ) -> Result<u32, GenerateError> {
        let logits = self.logits_after(tokens)?;
        let own = logits.and_then(|logits| pick(&logits));
        let own = own.map_or(-1, |token| token as i64);
        // The rank with the last stage tells the others.
        let last = self.placement.last().copied().unwrap_or(0);
        let pipeline = self.groups.pipeline();
        let token = match pipeline.broadcast(vec![own].into(), last)? {
            Buffer::I64(token) => token[0],
            other => unreachable!("i64 went in, {} came out", other.dtype()),
        };
        let after = tokens.len();
        u32::try_from(token).map_err(|_| GenerateError::Logits { after })
    }

    /// How many tokens of a text are in the cache, in their places.
    fn known(&self, seen: &[u32]) -> usize {
        let same = self.read.iter().zip(seen).take_while(|(a, b)| a == b);
        match self.keeps {
            true => same.count(),
            false => 0,
        }
    }

    /// Reads more tokens.
    fn forward(&mut self, ids: &[u32]) -> Result<Option<Tensor<3>>, CommError> {
        self.cache.keep(self.read.len());
        let (model, cache) = (self.model, &mut self.cache);
        let values: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let data = TensorData::new(values, [1, ids.len()]);
        let tokens = Tensor::<2, Int>::from_data(data, &self.device);
        let pipeline = self.groups.pipeline();
        let hidden = forward_only(&self.placement, pipeline, &self.device, |stage, input| {
            model.hidden_after(stage, input, tokens.clone(), cache)
        })?;
        self.read.extend(ids);
        Ok(hidden)
    }
}
