//! Storage of tokenized examples.

use std::ops::Range;

use indicatif::HumanCount;
use xxhash_rust::xxh3::Xxh3;

use super::LongExamples;
use super::error::ChatLineError;
use super::tokens::ChatTokens;
use crate::{IGNORE, Sample};

/// Tokenized examples. Each has at least two tokens and at least one target.
#[derive(Debug, Default)]
pub(super) struct Examples {
    tokens: Vec<i32>,
    is_answer: Vec<bool>,
    /// The end of each example.
    ends: Vec<usize>,
}

/// The numbers of examples that did not fit a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ExampleCounts {
    truncated: u64,
    dropped: u64,
    /// The number of examples without an answer after truncation; these are left out.
    without_answer: u64,
}

impl ExampleCounts {
    /// Describes the truncated and the omitted examples, for the end of a line.
    pub fn describe(&self) -> String {
        let each = [
            (self.truncated, "truncated"),
            (self.dropped, "left out (longer than a row)"),
            (self.without_answer, "left out (the prompt fills a row)"),
        ];
        let each = each.into_iter().filter(|(count, _)| *count > 0);
        each.map(|(count, what)| format!("; {} {what}", HumanCount(count)))
            .collect()
    }
}

impl Examples {
    /// Adds an example that has a target, for rows of `seq` tokens.
    pub fn add(
        &mut self,
        mut example: ChatTokens,
        seq: usize,
        long: LongExamples,
        counts: &mut ExampleCounts,
    ) -> Result<(), ChatLineError> {
        let tokens = example.tokens.len();
        if tokens > seq + 1 {
            match long {
                LongExamples::Refuse => return Err(ChatLineError::Long { tokens, seq }),
                LongExamples::Drop => {
                    counts.dropped += 1;
                    return Ok(());
                }
                LongExamples::Truncate => {
                    example.tokens.truncate(seq + 1);
                    example.is_answer.truncate(seq + 1);
                    if !example.is_answer[1..].contains(&true) {
                        counts.without_answer += 1;
                        return Ok(());
                    }
                    counts.truncated += 1;
                }
            }
        }
        self.tokens
            .extend(example.tokens.iter().map(|token| *token as i32));
        self.is_answer.extend(example.is_answer);
        self.ends.push(self.tokens.len());
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the number of tokens that have a loss.
    pub fn answers(&self) -> usize {
        self.is_answer
            .iter()
            .filter(|is_answer| **is_answer)
            .count()
    }

    /// Returns the examples for which `wanted` is true, by their numbers.
    pub fn those(&self, wanted: impl Fn(usize) -> bool) -> Self {
        let mut those = Self::default();
        for example in (0..self.len()).filter(|example| wanted(*example)) {
            let range = self.range(example);
            those.tokens.extend(&self.tokens[range.clone()]);
            those.is_answer.extend(&self.is_answer[range]);
            those.ends.push(those.tokens.len());
        }
        those
    }

    fn range(&self, example: usize) -> Range<usize> {
        let start = example.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[example]
    }

    /// Returns the number of inputs of an example: all tokens except the last, which is only a target.
    pub fn inputs(&self, example: usize) -> usize {
        self.range(example).len() - 1
    }

    /// Appends an example as a document.
    pub fn append(&self, example: usize, sample: &mut Sample) {
        let range = self.range(example);
        let (tokens, is_answer) = (&self.tokens[range.clone()], &self.is_answer[range]);
        sample.documents.push(sample.tokens.len());
        sample.tokens.extend(&tokens[..tokens.len() - 1]);
        let targets = tokens.iter().zip(is_answer).skip(1);
        sample
            .targets
            .extend(targets.map(|(token, is_answer)| match is_answer {
                true => *token,
                false => IGNORE,
            }));
    }

    pub fn hash(&self, hash: &mut Xxh3) {
        hash.update(&(self.len() as u64).to_le_bytes());
        for (token, is_answer) in self.tokens.iter().zip(&self.is_answer) {
            hash.update(&token.to_le_bytes());
            hash.update(&[u8::from(*is_answer)]);
        }
        self.ends
            .iter()
            .for_each(|end| hash.update(&(*end as u64).to_le_bytes()));
    }
}
