//! Conversations for fine-tuning. They are read from JSON lines files of prompts and answers. By default, only the
//! answers have a loss.
//!
//! Each line is rendered with the [chat template](crate::tokenizer::chat) of the tokenizer, and then tokenized.
//! Examples are packed into sequences, like with `packing = "bfd"` in TRL. Tokens do not attend to other examples in
//! their sequence.

mod error;
mod examples;
mod read;
mod record;
mod rows;
#[cfg(test)]
mod tests;
mod tokens;
mod tools;

use std::path::PathBuf;
use std::sync::Arc;

use indicatif::HumanCount;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::gpt::RandomState;
use super::{DataError, Dataset, Sample, Samples, Sampling};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::chat::ChatTemplate;
pub use error::{ChatDataError, ChatLineError};
use examples::{ExampleCounts, Examples};
use rows::{ChatRows, ChatSamples};
use tokens::ChatTokenizer;

#[cfg(test)]
pub(crate) use record::messages as chat_messages;
#[cfg(test)]
pub(crate) use tokens::mask as chat_mask;

/// The seed that selects and orders held-out examples, equal in all runs.
const HELD_OUT_SEED: u32 = 1234;

/// The tokens of a conversation that have a loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TrainedTokens {
    /// The text of the assistant in all turns, including the end of each turn.
    #[default]
    Answers,
    /// Only the last answer of each conversation.
    Last,
    /// All tokens of the conversation.
    All,
}

/// The treatment of examples that are longer than the sequence length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LongExamples {
    /// The end of a long example is cut off.
    #[default]
    Truncate,
    /// The example is left out.
    Drop,
    /// A long example is an error.
    Refuse,
}

/// The examples that are held out from training.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOutExamples {
    /// A share of all examples, at least 0 and below 1. The same examples are always selected. If the share is above 0,
    /// at least one example is held out.
    Share(f64),
    /// The conversations in other files.
    Files(Vec<PathBuf>),
}

/// Settings for reading conversations and packing them into sequences.
///
/// ```
/// use burn_megatron_data::chat::{
///     ChatData, ChatDataConfig, HeldOutExamples, LongExamples, TrainedTokens,
/// };
/// use burn_megatron_data::tokenizer::Tokenizer;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("sums.jsonl");
/// let line = |prompt, answer| format!("{{\"prompt\": \"{prompt}\", \"completion\": \"{answer}\"}}\n");
/// std::fs::write(&path, line("1+1=", 2) + &line("1+2=", 3))?;
/// let config = ChatDataConfig {
///     files: vec![path],
///     held_out: HeldOutExamples::Share(0.0),
///     loss: TrainedTokens::Answers,
///     long: LongExamples::Truncate,
///     packing: true,
///     seq: 16,
/// };
/// let data = ChatData::open(config, &Tokenizer::bytes(), None, &mut |_| {})?;
/// // Both examples fit into one row.
/// assert_eq!(data.rows(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ChatDataConfig {
    /// The JSON lines files, or folders whose `.jsonl` files are read.
    pub files: Vec<PathBuf>,
    /// The examples that are held out from training.
    pub held_out: HeldOutExamples,
    /// The tokens that have a loss.
    pub loss: TrainedTokens,
    /// The treatment of examples that are longer than the sequence length.
    pub long: LongExamples,
    /// Whether several examples are packed into one sequence. If false, each sequence has one example and padding.
    pub packing: bool,
    /// The number of tokens per sequence. An example may be one token longer, because its last token is only a target.
    pub seq: usize,
}

/// A [`Dataset`] of tokenized conversations, which are packed into sequences.
pub struct ChatData {
    config: ChatDataConfig,
    tokenizer: String,
    vocabulary: usize,
    training: Arc<ChatRows>,
    held_out: Arc<ChatRows>,
    counts: ExampleCounts,
    fingerprint: u64,
}

impl ChatData {
    /// Reads and tokenizes all examples on all CPU cores. `progress` is called with the number of bytes that were read
    /// since the previous call. The result does not depend on the number of threads.
    ///
    /// Without a chat template, the text of a line is its prompt and its answer, followed by the end token of the
    /// tokenizer.
    ///
    /// # Errors
    ///
    /// [`ChatDataError`] with the file and the number of the first invalid line, or if there are too few examples.
    pub fn open(
        config: ChatDataConfig,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Self, DataError> {
        if config.seq == 0 {
            return Err(DataError::ZeroLength);
        }
        let worker = ChatTokenizer {
            tokenizer,
            template,
            loss: config.loss,
        };
        let mut counts = ExampleCounts::default();
        let mut examples = |files: &[PathBuf]| {
            let mut examples = Examples::default();
            for file in read::files(files)? {
                read::examples(&file, &worker, progress, &mut |line, example| {
                    let added = examples.add(example, config.seq, config.long, &mut counts);
                    added.map_err(|source| source.at(&file, line))
                })?;
            }
            Ok::<_, DataError>(examples)
        };
        let (training, held_out) = match &config.held_out {
            HeldOutExamples::Files(files) => (examples(&config.files)?, examples(files)?),
            HeldOutExamples::Share(share) => split(examples(&config.files)?, *share)?,
        };
        if training.len() == 0 {
            return Err(ChatDataError::NoExamples {
                counts: counts.describe(),
            }
            .into());
        }
        let rows = |examples| Arc::new(ChatRows::new(examples, config.seq, config.packing));
        let mut opened = Self {
            tokenizer: tokenizer.name().into(),
            vocabulary: tokenizer.vocabulary(),
            training: rows(training),
            held_out: rows(held_out),
            counts,
            fingerprint: 0,
            config,
        };
        let mut hash = Xxh3::new();
        hash.update(format!("{} {}", opened.config.seq, opened.config.packing).as_bytes());
        opened.training.examples.hash(&mut hash);
        opened.held_out.examples.hash(&mut hash);
        opened.fingerprint = hash.digest();
        Ok(opened)
    }

    /// Returns the number of packed sequences with training examples per epoch.
    pub fn rows(&self) -> usize {
        self.training.len()
    }

    fn check_length(&self, seq: usize) -> Result<(), ChatDataError> {
        let opened = self.config.seq;
        if seq == opened {
            Ok(())
        } else {
            Err(ChatDataError::Length { opened, seq })
        }
    }
}

/// Splits examples into training examples and held-out examples.
fn split(examples: Examples, share: f64) -> Result<(Examples, Examples), ChatDataError> {
    if !(0.0..1.0).contains(&share) {
        return Err(ChatDataError::Share(share));
    }
    let count = examples.len();
    if share == 0.0 || count == 0 {
        return Ok((examples, Examples::default()));
    }
    let held_out = ((count as f64 * share).round() as usize).max(1);
    if held_out >= count {
        return Err(ChatDataError::TooFew { count, share });
    }
    let mut order: Vec<usize> = (0..count).collect();
    RandomState::new(HELD_OUT_SEED).shuffle(&mut order);
    let mut is_held_out = vec![false; count];
    order[..held_out]
        .iter()
        .for_each(|example| is_held_out[*example] = true);
    Ok((
        examples.those(|i| !is_held_out[i]),
        examples.those(|i| is_held_out[i]),
    ))
}

impl Dataset for ChatData {
    fn describe(&self) -> String {
        let files = self.config.files.iter();
        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
        let (training, held_out) = (&self.training, &self.held_out);
        let examples = &training.examples;
        let answers = 100.0 * examples.answers() as f64 / examples.tokens() as f64;
        format!(
            "{}: {} conversations to train on, {} held out; {} tokens of {}, {answers:.1} % have a loss; {} rows of {}, {:.1} % \
             full{}",
            files.join(", "),
            HumanCount(examples.len() as u64),
            HumanCount(held_out.examples.len() as u64),
            HumanCount(examples.tokens() as u64),
            self.tokenizer,
            HumanCount(training.len() as u64),
            self.config.seq,
            100.0 * training.fill_ratio(),
            self.counts.describe(),
        )
    }

    /// Returns a 64-bit XXH3 hash of the tokens, the loss mask and the packing.
    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the training samples. Each epoch has the same rows in a different order.
    fn training(&self, sampling: &Sampling) -> Result<Arc<dyn Samples>, DataError> {
        self.check_length(sampling.seq)?;
        let rows = Arc::clone(&self.training);
        Ok(Arc::new(ChatSamples::new(rows, sampling.seed)))
    }

    fn held_out(&self, seq: usize, max: usize) -> Result<Vec<Sample>, DataError> {
        self.check_length(seq)?;
        let rows = &self.held_out;
        let mut order: Vec<usize> = (0..rows.len()).collect();
        RandomState::new(HELD_OUT_SEED).shuffle(&mut order);
        Ok(order
            .into_iter()
            .take(max)
            .map(|row| rows.sample(row))
            .collect())
    }
}
