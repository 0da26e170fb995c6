//! The state of a text while it is generated.

use std::io;
use std::time::{Duration, Instant};

use burn_megatron_kernels::philox::{Stream, uniform};

use super::reader::TextToRead;
use super::stop::StopStringFilter;
use super::{FinishReason, GenerateConfig, GenerateError, GenerationOutput, Written};
use burn_megatron_data::tokenizer::{DecodeStream, Tokenizer};

/// The value in place of a sampled token if the logits of the token are not finite.
pub(super) const NOT_FINITE: i64 = -1;
/// The value in place of a sampled token if the draft before it was rejected.
const REJECTED: i64 = -2;

/// A prompt and the tokens after it.
pub(super) struct Writing<'a> {
    /// The index of the text.
    index: usize,
    /// The index of the sample among all samples of its prompt.
    sample: usize,
    prompt: usize,
    config: &'a GenerateConfig,
    tokenizer: &'a Tokenizer,
    /// The tokens, including the prompt.
    tokens: Vec<u32>,
    logprobs: Vec<f64>,
    characters: DecodeStream<'a>,
    until: StopStringFilter<'a>,
    text: String,
    /// The reason why the text ended before its maximum length, if it ended.
    ended: Option<FinishReason>,
    /// The drafted token for the next position.
    draft: Option<u32>,
    drafted: usize,
    accepted: usize,
    started: Instant,
    prefill: Duration,
    decoded: Duration,
}

impl<'a> Writing<'a> {
    /// Starts text `index`, which is sample `sample` of its prompt.
    pub fn new(
        (index, sample): (usize, usize),
        prompt: &[u32],
        config: &'a GenerateConfig,
        tokenizer: &'a Tokenizer,
    ) -> Result<Self, GenerateError> {
        let mut characters = tokenizer.stream();
        for token in prompt {
            // The text of a token may depend on earlier tokens.
            characters.push(*token)?;
        }
        Ok(Self {
            index,
            sample,
            prompt: prompt.len(),
            config,
            tokenizer,
            tokens: prompt.to_vec(),
            logprobs: vec![],
            characters,
            until: StopStringFilter::new(&config.stop),
            text: String::new(),
            ended: None,
            draft: None,
            drafted: 0,
            accepted: 0,
            started: Instant::now(),
            prefill: Duration::ZERO,
            decoded: Duration::ZERO,
        })
    }

    /// Starts to measure the time.
    pub fn start(&mut self) {
        self.started = Instant::now();
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the tokens to read to get the next token. They include the draft if the text is short enough. `room`
    /// returns the maximum length of a text with a draft, given the length of the text.
    pub fn to_read(&self, sequence: usize, room: impl Fn(usize) -> usize) -> TextToRead<'_> {
        let Some(draft) = self.usable_draft(room(self.tokens.len())) else {
            return TextToRead {
                sequence,
                tokens: (&self.tokens).into(),
                last: 1,
            };
        };
        let mut tokens = self.tokens.clone();
        tokens.push(draft);
        TextToRead {
            sequence,
            tokens: tokens.into(),
            last: 2,
        }
    }

    /// Returns the draft, unless the text would have no space for a token after the draft.
    fn usable_draft(&self, room: usize) -> Option<u32> {
        let left = self.config.tokens - (self.tokens.len() - self.prompt);
        self.draft.filter(|_| left > 1 && self.tokens.len() < room)
    }

    pub fn has_ended(&self) -> bool {
        self.ended.is_some() || self.tokens.len() - self.prompt == self.config.tokens
    }

    /// Samples a new token from its logits, or returns [`NOT_FINITE`]. `ahead` is the number of new tokens that were
    /// sampled before it in the same step. New token `i` uses random number `i` of the sample's stream, so it does not
    /// depend on other texts.
    pub fn draw(&self, logits: &[f64], ahead: usize) -> i64 {
        let draws = Stream::new(self.config.seed.unwrap_or(0), self.sample as u64);
        let (number, mut point) = (self.tokens.len() - self.prompt + ahead, 0.0);
        draws.words(number as u64, 1, |_, word| point = uniform(word));
        let token = self.config.draw(logits, point);
        token.map_or(NOT_FINITE, |token| token as i64)
    }

    /// Samples the next token. If it is equal to the draft, also samples the token after the draft.
    pub fn draw_all(&self, logits: &[Vec<f64>]) -> Vec<i64> {
        let mut drawn = vec![];
        for (ahead, row) in logits.iter().enumerate() {
            let is_wrong = drawn.last().is_some_and(|token| !self.is_draft(*token));
            drawn.push(match is_wrong {
                true => REJECTED,
                false => self.draw(row, ahead),
            });
        }
        drawn
    }

    fn is_draft(&self, token: i64) -> bool {
        self.draft.map(i64::from) == Some(token)
    }

    /// Returns the tokens among the sampled values, without `REJECTED`.
    pub fn accepted(&self, drawn: &[i64]) -> Result<Vec<u32>, GenerateError> {
        let drawn = drawn.iter().take_while(|token| **token != REJECTED);
        let token = |(i, token): (usize, &i64)| {
            let after = self.tokens.len() + i;
            u32::try_from(*token).map_err(|_| GenerateError::Logits { after })
        };
        drawn.enumerate().map(token).collect()
    }

    pub fn set_draft(&mut self, token: i64) {
        self.draft = u32::try_from(token).ok();
    }

    /// Adds tokens until the text ends.
    pub fn push_all(
        &mut self,
        tokens: &[u32],
        was_drafted: bool,
        logprobs: &[f64],
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(), GenerateError> {
        self.drafted += usize::from(was_drafted);
        self.accepted += tokens.len() - 1;
        for (i, token) in tokens.iter().enumerate() {
            if !self.has_ended() {
                self.push(*token, logprobs.get(i).copied(), on_text)?;
            }
        }
        Ok(())
    }

    /// Adds a token.
    fn push(
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

    /// Ends the text, and writes the text that was held back.
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
            drafted: self.drafted,
            accepted: self.accepted,
            prefill: self.prefill,
            decode: self.decoded,
        })
    }
}
