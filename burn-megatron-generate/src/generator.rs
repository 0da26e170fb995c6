//! The text generator of a rank.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

use burn::tensor::Device;

use super::reader::{Reader, TextToRead, TextsRead};
use super::writing::{self, Writing};
use super::{GenerateConfig, GenerateError};
use burn_megatron::comm::{CommError, ParallelContext};
use burn_megatron::model::LanguageModel;
use burn_megatron_data::tokenizer::Tokenizer;

/// A text generator that uses this rank's part of a model.
///
/// All methods are collective: call them on all ranks of the tensor, pipeline and context groups with the same
/// arguments. All of these ranks get the same texts.
///
/// Several prompts are continued at the same time: each forward pass reads the next token of every text in the batch.
/// When a text ends, the next prompt takes its place. The tokens of a text do not depend on the other texts in the
/// batch.
///
/// The ranks of a context-parallel group share the work of reading a prompt (prefill). Each rank reads a part of each
/// chunk of the prompt, and stores the keys and values of this part ([`KvCache`](burn_megatron::nn::KvCache)).
///
/// ```
/// use std::error::Error;
///
/// use burn::tensor::Device;
/// use burn_megatron::prelude::*;
/// use burn_megatron_data::tokenizer::Tokenizer;
/// use burn_megatron_generate::{GenerateConfig, Generator};
///
/// /// Returns the text that a byte-level model writes after a prompt.
/// fn complete<M: LanguageModel>(model: &M, prompt: &str) -> Result<String, Box<dyn Error>> {
///     let (groups, tokenizer) = (ParallelContext::single(), Tokenizer::bytes());
///     let config = GenerateConfig { tokens: 16, ..GenerateConfig::default() };
///     let prompt = tokenizer.encode(prompt)?;
///     let mut generator = Generator::new(model, &groups, &Device::flex());
///     let output = generator.generate(&prompt, &config, &tokenizer, &mut |_| Ok(()))?;
///     Ok(output.text)
/// }
/// ```
#[derive(Debug)]
pub struct Generator<'a, M: LanguageModel> {
    reader: Reader<'a, M>,
}

/// The result of generating one text.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationOutput {
    /// The generated text, without the prompt and without the stop string.
    pub text: String,
    /// The new tokens, including the last token that ended the text.
    pub tokens: Vec<u32>,
    /// The reason why the generation of this text ended.
    pub finish_reason: FinishReason,
    /// The number of tokens in the prompt.
    pub prompt: usize,
    /// The log-probability of each new token in nats, computed without temperature, `top_k` and `top_p`. Empty unless
    /// [`logprobs`](GenerateConfig::logprobs) is set.
    pub logprobs: Vec<f64>,
    /// The number of tokens that were drafted by [speculative decoding](GenerateConfig::speculative).
    pub drafted: usize,
    /// The number of [drafted](Self::drafted) tokens that were accepted.
    pub accepted: usize,
    /// The time from the start to the first new token.
    pub prefill: Duration,
    /// The time from the first to the last new token.
    pub decode: Duration,
}

/// An event during the generation of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written<'a> {
    /// A new part of the text, which contains only complete characters.
    Text(&'a str),
    /// The text has ended.
    End,
}

/// The reason why the generation of a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The maximum number of new tokens was generated.
    Length,
    /// A stop string occurred in the text.
    Stop,
    /// A stop token was generated, such as an end-of-text token.
    Token,
}

impl<'a, M: LanguageModel> Generator<'a, M> {
    /// Creates a generator. Pipeline stage `s` is on pipeline rank `s`. See [`with_placement`](Self::with_placement)
    /// for other placements.
    pub fn new(model: &'a M, groups: &'a ParallelContext, device: &Device) -> Self {
        Self {
            reader: Reader::new(model, groups, device),
        }
    }

    /// Sets the placement of the pipeline stages: stage `s` is on pipeline rank `placement[s]`.
    pub fn with_placement(mut self, placement: Vec<usize>) -> Self {
        self.reader.placement = placement;
        self
    }

    /// Disables the KV cache: the complete text is read again for each new token.
    pub fn without_cache(mut self) -> Self {
        self.reader.use_cache = false;
        self
    }

    /// Returns the size in bytes of this rank's [KV cache](LanguageModel::Cache).
    pub fn cache_bytes(&self) -> usize {
        self.reader.cache_bytes()
    }

    /// Generates one text that continues the tokens of a prompt. `on_text` is called with each new part of the text,
    /// which contains only complete characters.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] for invalid settings, a prompt with tokens outside of the vocabulary, logits that are not
    /// finite, and failed collectives.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: &mut dyn FnMut(&str) -> io::Result<()>,
    ) -> Result<GenerationOutput, GenerateError> {
        let on_text = &mut |_: usize, written: Written<'_>| match written {
            Written::Text(text) => on_text(text),
            Written::End => Ok(()),
        };
        let config = GenerateConfig {
            samples: 1,
            ..config.clone()
        };
        let outputs = self.generate_batch(&[prompt], 1, &config, tokenizer, on_text)?;
        let only = outputs.into_iter().next();
        Ok(only.unwrap_or_else(|| unreachable!("a prompt has an output")))
    }

    /// Generates [`samples`](GenerateConfig::samples) texts for each prompt, up to `batch_size` texts at a time.
    ///
    /// Returns all samples of the first prompt, then all samples of the next prompt, and so on. `on_text` is called
    /// with the index of a text in this order and the new part of the text. The first sample of a prompt is equal to
    /// the text that [`generate`](Self::generate) returns. All prompts use the same seed, so equal prompts have equal
    /// texts.
    ///
    /// # Errors
    ///
    /// The errors of [`generate`](Self::generate), and [`GenerateError::BatchSize`] if `batch_size` is 0. An error in
    /// one text ends the generation of all texts.
    pub fn generate_batch<P: AsRef<[u32]>>(
        &mut self,
        prompts: &[P],
        batch_size: usize,
        config: &GenerateConfig,
        tokenizer: &Tokenizer,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<Vec<GenerationOutput>, GenerateError> {
        config.check()?;
        if batch_size == 0 {
            return Err(GenerateError::BatchSize);
        }
        self.reader.set_speculative(config.speculative)?;
        for prompt in prompts {
            self.reader.check(prompt.as_ref())?;
        }
        let mut queue = VecDeque::new();
        for prompt in prompts {
            for sample in 0..config.samples {
                let number = (queue.len(), sample);
                queue.push_back(Writing::new(number, prompt.as_ref(), config, tokenizer)?);
            }
        }
        let mut free: Vec<usize> = (0..batch_size.min(queue.len())).rev().collect();
        let (mut batch, mut done) = (vec![], BTreeMap::new());
        loop {
            while let Some(slot) = free.pop() {
                let Some(mut next) = queue.pop_front() else {
                    break;
                };
                next.start();
                batch.push((slot, next));
            }
            let (going, ended): (Vec<_>, Vec<_>) =
                batch.into_iter().partition(|(_, text)| !text.has_ended());
            batch = going;
            for (slot, text) in ended {
                free.push(slot);
                done.insert(text.index(), text.finish(on_text)?);
            }
            match (batch.is_empty(), queue.is_empty()) {
                (true, true) => break,
                (true, false) => {}
                (false, _) => self.step(&mut batch, config, on_text)?,
            }
        }
        let mut outputs: Vec<_> = done.into_values().collect();
        if config.logprobs {
            self.share_logprobs(&mut outputs)?;
        }
        Ok(outputs)
    }

    /// Adds the next token to each text, or the next two tokens if the draft was accepted.
    fn step(
        &mut self,
        batch: &mut [(usize, Writing<'_>)],
        config: &GenerateConfig,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(), GenerateError> {
        let texts = batch
            .iter()
            .map(|(slot, text)| text.to_read(*slot, |length| self.reader.room(length)));
        let reads = self.reader.read(&texts.collect::<Vec<_>>())?;
        let mut rest = &mut *batch;
        for read in &reads {
            let texts;
            (texts, rest) = rest.split_at_mut(read.counts().len());
            self.write(texts, read, config, on_text)?;
        }
        Ok(())
    }

    /// Adds the sampled tokens to the texts, and drafts the token after them.
    fn write(
        &mut self,
        texts: &mut [(usize, Writing<'_>)],
        read: &TextsRead,
        config: &GenerateConfig,
        on_text: &mut dyn FnMut(usize, Written<'_>) -> io::Result<()>,
    ) -> Result<(), GenerateError> {
        let own = match self.reader.logits(read) {
            Some(logits) => {
                let drawn = texts.iter().zip(&logits);
                drawn
                    .flat_map(|((_, text), rows)| text.draw_all(rows))
                    .collect()
            }
            None => vec![writing::NOT_FINITE; read.counts().sum()],
        };
        let drawn = self.reader.share_tokens(own)?;
        let (mut drawn, mut next) = (&drawn[..], vec![]);
        for ((_, text), count) in texts.iter().zip(read.counts()) {
            let own;
            (own, drawn) = drawn.split_at(count);
            next.push(text.accepted(own)?);
        }
        let logprobs = match config.logprobs {
            true => self.reader.logprobs(read, &next),
            false => vec![vec![]; next.len()],
        };
        let read_drafts = read.counts().map(|count| count > 1);
        for ((((_, text), next), logprobs), was_drafted) in
            texts.iter_mut().zip(&next).zip(&logprobs).zip(read_drafts)
        {
            text.push_all(next, was_drafted, logprobs, on_text)?;
        }
        if self.reader.drafts {
            let logits = self.reader.draft(read, &next);
            let own = match &logits {
                Some(logits) => {
                    let drafts = texts.iter().zip(logits);
                    drafts.map(|((_, text), row)| text.draw(row, 0)).collect()
                }
                None => vec![writing::NOT_FINITE; texts.len()],
            };
            let drafts = self.reader.share_tokens(own)?;
            for ((_, text), draft) in texts.iter_mut().zip(drafts) {
                text.set_draft(draft);
            }
        }
        Ok(())
    }

    /// Broadcasts the log-probabilities from the last pipeline stage to all pipeline ranks.
    fn share_logprobs(&self, outputs: &mut [GenerationOutput]) -> Result<(), CommError> {
        let own = outputs.iter().flat_map(|output| {
            let missing = output.tokens.len() - output.logprobs.len();
            output.logprobs.iter().copied().chain(vec![0.0; missing])
        });
        let mut all = self.reader.share_values(own.collect())?.into_iter();
        for output in outputs {
            output.logprobs = all.by_ref().take(output.tokens.len()).collect();
        }
        Ok(())
    }

    /// Returns the logits of the token after `tokens` on the ranks of the last pipeline stage, and `None` on the other
    /// ranks. If there are more tokens than the context length of the model, only the last tokens are read.
    ///
    /// # Errors
    ///
    /// [`GenerateError`] if there are no tokens, for a token outside of the vocabulary, and for failed collectives.
    pub fn logits_after(&mut self, tokens: &[u32]) -> Result<Option<Vec<f64>>, GenerateError> {
        self.reader.check(tokens)?;
        self.reader.set_speculative(false)?;
        let text = TextToRead {
            sequence: 0,
            tokens: tokens.into(),
            last: 1,
        };
        let reads = self.reader.read(&[text])?;
        let logits = reads.iter().find_map(|read| self.reader.logits(read));
        Ok(logits.and_then(|texts| texts.into_iter().flatten().next()))
    }
}
