//! A text that is written.

use std::io;
use std::time::{Duration, Instant};

use burn_megatron_kernels::philox::{Stream, uniform};

use super::stop::StopStringFilter;
use super::{FinishReason, GenerateConfig, GenerateError, GenerationOutput, Written};
use crate::tokenizer::{DecodeStream, Tokenizer};

/// A prompt and the tokens after it.
pub(super) struct Writing<'a> {
    /// The number of the prompt.
    index: usize,
    prompt: usize,
    config: &'a GenerateConfig,
    tokenizer: &'a Tokenizer,
    /// With the prompt.
    tokens: Vec<u32>,
    logprobs: Vec<f64>,
    characters: DecodeStream<'a>,
    until: StopStringFilter<'a>,
    text: String,
    /// Why the text has ended, before its maximum length.
    ended: Option<FinishReason>,
    started: Instant,
    prefill: Duration,
    decoded: Duration,
}

impl<'a> Writing<'a> {
    pub fn new(
        index: usize,
        prompt: &[u32],
        config: &'a GenerateConfig,
        tokenizer: &'a Tokenizer,
    ) -> Result<Self, GenerateError> {
        let mut characters = tokenizer.stream();
        for token in prompt {
            // The text of a token may depend on the ones before it.
            characters.push(*token)?;
        }
        Ok(Self {
            index,
            prompt: prompt.len(),
            config,
            tokenizer,
            tokens: prompt.to_vec(),
            logprobs: vec![],
            characters,
            until: StopStringFilter::new(&config.stop),
            text: String::new(),
            ended: None,
            started: Instant::now(),
            prefill: Duration::ZERO,
            decoded: Duration::ZERO,
        })
    }

    /// Begins to measure the time.
    pub fn start(&mut self) {
        self.started = Instant::now();
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// The prompt and the new tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn has_ended(&self) -> bool {
        self.ended.is_some() || self.tokens.len() - self.prompt == self.config.tokens
    }

    /// The next token from its logits; `None` if they are not finite. Draw `i` of the stream of the seed is that of new
    /// token `i`, whatever other texts there are.
    pub fn draw(&self, logits: &[f64]) -> Option<usize> {
        let draws = Stream::new(self.config.seed.unwrap_or(0), 0);
        let (number, mut point) = (self.tokens.len() - self.prompt, 0.0);
        draws.words(number as u64, 1, |_, word| point = uniform(word));
        self.config.draw(logits, point)
    }

    /// Adds a token.
    pub fn push(
        &mut self,
        token: u32,
        logprob: Option<f64>,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(), GenerateError> {
        let elapsed = self.started.elapsed();
        if self.tokens.len() == self.prompt {
            self.prefill = elapsed;
        }
        self.decoded = elapsed - self.prefill;
        self.tokens.push(token);
        self.logprobs.extend(logprob);
        if self.tokenizer.special().stop_tokens.contains(&token) {
            self.ended = Some(FinishReason::Token);
            return Ok(());
        }
        let new = self.until.push(&self.characters.push(token)?);
        self.write(&new, on_text)?;
        if self.until.is_stopped() {
            self.ended = Some(FinishReason::Stop);
        }
        Ok(())
    }

    fn write(
        &mut self,
        new: &str,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        self.text.push_str(new);
        on_text(self.index, Written::Text(new))
    }

    /// Ends the text: writes what was held back.
    pub fn finish(
        mut self,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<GenerationOutput, GenerateError> {
        let finish_reason = self.ended.unwrap_or(FinishReason::Length);
        if finish_reason != FinishReason::Stop {
            let mut rest = self.until.push(&self.characters.finish()?);
            rest.push_str(&self.until.finish());
            on_text(self.index, Written::Text(&rest))?;
            self.text.push_str(&rest);
        }
        on_text(self.index, Written::End)?;
        Ok(GenerationOutput {
            text: self.text,
            finish_reason,
            prompt: self.prompt,
            tokens: self.tokens.split_off(self.prompt),
            logprobs: self.logprobs,
            prefill: self.prefill,
            decode: self.decoded,
        })
    }
}
