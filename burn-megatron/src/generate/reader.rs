//! Reads texts with this rank's part of a model.

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::GenerateError;
use crate::comm::{CommError, ParallelContext};
use crate::model::{GenerationCache, LanguageModel};
use crate::nn::{NewTokens, SequencePart};
use crate::pipeline::engine::forward_only;

/// Prefill reads a long prompt in chunks of this many tokens for each rank, to bound the memory of activations.
const PREFILL_CHUNK: usize = 512;

/// A model, and what of which texts is in its cache.
#[derive(Debug)]
pub(super) struct Reader<'a, M: LanguageModel> {
    model: &'a M,
    groups: &'a ParallelContext,
    device: Device,
    /// The pipeline rank of each stage.
    pub placement: Vec<usize>,
    pub use_cache: bool,
    cache: M::Cache,
    /// The tokens in the cache, by sequence.
    cached: Vec<Vec<u32>>,
}

/// What the model returned for some texts.
#[derive(Debug)]
pub(super) struct TextsRead {
    /// On the ranks that have the last stage.
    hidden: Option<Tensor<3>>,
    /// The row of the last token of each text.
    pub rows: Vec<usize>,
}

/// Which tokens a rank of a context group reads.
#[derive(Clone, Copy, Debug)]
enum Reading {
    /// Those of its part.
    Prefill,
    /// All.
    Whole,
}

/// New tokens of sequences.
type Parts<'t> = Vec<(usize, &'t [u32])>;

impl<'a, M: LanguageModel> Reader<'a, M> {
    /// A reader with one stage per pipeline rank, in order.
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

    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Checks a text.
    pub fn check(&self, tokens: &[u32]) -> Result<(), GenerateError> {
        let vocabulary = self.model.vocabulary();
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            let token = *token;
            return Err(GenerateError::Vocabulary { token, vocabulary });
        }
        if tokens.is_empty() {
            Err(GenerateError::NoPrompt)
        } else {
            Ok(())
        }
    }

    /// Reads what the cache has not of texts, each with the number of its sequence; of a text longer than the model's
    /// context the end. The results have the texts in order.
    pub fn read(&mut self, texts: &[(usize, &[u32])]) -> Result<Vec<TextsRead>, CommError> {
        let context = self.model.context();
        let (mut earlier, mut last) = (vec![], vec![]);
        for (sequence, tokens) in texts {
            let seen = &tokens[tokens.len().saturating_sub(context)..];
            let (before, newest) = seen.split_at(seen.len() - 1);
            let begin = self.begin(*sequence, before);
            earlier.push((*sequence, &before[begin..]));
            last.push((*sequence, newest));
        }
        self.prefill(earlier)?;
        // The last token of a text is in a call of its own kind, and only that call's logits are used.
        let at_once = self.cache.max_sequences();
        let groups = last.chunks(at_once);
        groups
            .map(|parts| self.forward(parts, Reading::Whole))
            .collect()
    }

    /// Keeps of a sequence in the cache what a text begins with; returns how many tokens.
    fn begin(&mut self, sequence: usize, text: &[u32]) -> usize {
        let count = self.cached.len().max(sequence + 1);
        self.cached.resize(count, vec![]);
        let cached = &mut self.cached[sequence];
        let same = cached.iter().zip(text).take_while(|(a, b)| a == b);
        let same = if self.use_cache { same.count() } else { 0 };
        let kept = self.cache.kept(sequence, same);
        cached.truncate(kept);
        self.cache.set_len(sequence, kept);
        kept
    }

    /// Reads tokens whose logits are not needed. A text is cut into the same chunks as alone; those of several texts are
    /// read together while they are short.
    fn prefill(&mut self, texts: Parts<'_>) -> Result<(), CommError> {
        let ranks = self.cache.prefill_multiple();
        let multiple = self.model.sequence_multiple();
        let mut together: Parts<'_> = vec![];
        for (sequence, tokens) in texts {
            // What the ranks of a context group cannot divide, each of them reads.
            let divided = match ranks {
                1 => 0,
                _ => tokens.len() / (ranks * multiple) * (ranks * multiple),
            };
            let (divided, rest) = tokens.split_at(divided);
            for chunk in divided.chunks(PREFILL_CHUNK.next_multiple_of(multiple) * ranks) {
                self.forward(&[(sequence, chunk)], Reading::Prefill)?;
            }
            for chunk in rest.chunks(PREFILL_CHUNK) {
                let count: usize = together.iter().map(|(_, tokens)| tokens.len()).sum();
                let is_full = count + chunk.len() > PREFILL_CHUNK
                    || together.len() == self.cache.max_sequences();
                if is_full {
                    self.prefill_together(&std::mem::take(&mut together), ranks)?;
                }
                together.push((sequence, chunk));
            }
        }
        self.prefill_together(&together, ranks)
    }

    fn prefill_together(
        &mut self,
        parts: &[(usize, &[u32])],
        ranks: usize,
    ) -> Result<(), CommError> {
        let reading = match ranks {
            1 => Reading::Prefill,
            _ => Reading::Whole,
        };
        if !parts.is_empty() {
            self.forward(parts, reading)?;
        }
        Ok(())
    }

    /// Runs the model on new tokens.
    fn forward(
        &mut self,
        parts: &[(usize, &[u32])],
        reading: Reading,
    ) -> Result<TextsRead, CommError> {
        let mut ids: Vec<i32> = vec![];
        for (_, tokens) in parts {
            ids.extend(tokens.iter().map(|id| *id as i32));
        }
        ids.resize(
            ids.len().next_multiple_of(self.model.sequence_multiple()),
            0,
        );
        let data = TensorData::new(ids.clone(), [1, ids.len()]);
        let part = |(sequence, tokens): &(usize, &[u32])| SequencePart {
            sequence: *sequence,
            count: tokens.len(),
        };
        let new = NewTokens {
            ids: Tensor::<2, Int>::from_data(data, &self.device),
            parts: parts.iter().map(part).collect(),
        };
        let (model, cache) = (self.model, &mut self.cache);
        let rows = cache.last_rows(&new);
        let pipeline = self.groups.pipeline();
        let hidden =
            forward_only(
                &self.placement,
                pipeline,
                &self.device,
                |stage, input| match reading {
                    Reading::Prefill => cache.prefill(model, stage, input, &new),
                    Reading::Whole => cache.hidden(model, stage, input, &new),
                },
            )?;
        for (sequence, tokens) in parts {
            self.cached[*sequence].extend(*tokens);
            self.cache.set_len(*sequence, self.cached[*sequence].len());
        }
        Ok(TextsRead { hidden, rows })
    }

    /// The logits of the next token of each text, on the ranks that have the last stage.
    pub fn logits(&self, read: &TextsRead) -> Option<Vec<Vec<f64>>> {
        let logits = self.model.logits_of(read.hidden.clone()?);
        let of_row = |row: &usize| {
            let row = logits.clone().narrow(1, *row, 1).into_data();
            match row.as_slice::<f32>() {
                Ok(values) => values.iter().map(|value| f64::from(*value)).collect(),
                Err(_) => row.iter::<f64>().collect(),
            }
        };
        Some(read.rows.iter().map(of_row).collect())
    }

    /// The log-probabilities of the next tokens, as the loss of training has them, on the ranks that have the last stage;
    /// nothing on others.
    pub fn logprobs(&self, read: &TextsRead, tokens: &[i64]) -> Vec<f64> {
        let Some(hidden) = read.hidden.clone() else {
            return vec![];
        };
        let [_, part, _] = hidden.dims();
        let mut targets = vec![0; part * self.model.sequence_multiple()];
        for (row, token) in read.rows.iter().zip(tokens) {
            targets[*row] = (*token).max(0) as i32;
        }
        let targets = TensorData::new(targets.clone(), [1, targets.len()]);
        let targets = Tensor::<2, Int>::from_data(targets, &self.device);
        let losses = self.model.losses_of(hidden, targets);
        let cross_entropy = losses.parts.into_iter().next();
        let losses = cross_entropy.unwrap_or(losses.objective).into_data();
        let losses: Vec<f64> = losses.iter::<f64>().collect();
        read.rows.iter().map(|row| -losses[*row]).collect()
    }

    /// The tokens that the rank with the last stage has drawn, on every rank.
    pub fn share_tokens(&self, own: Vec<i64>) -> Result<Vec<i64>, CommError> {
        let tokens = self.groups.pipeline().broadcast(own.into(), self.last())?;
        let context = self.groups.context();
        Ok(context.broadcast(tokens, 0)?.into_vec())
    }

    /// The values of the rank with the last stage, on every rank of the pipeline.
    pub fn share_values(&self, own: Vec<f64>) -> Result<Vec<f64>, CommError> {
        let values = self.groups.pipeline().broadcast(own.into(), self.last())?;
        Ok(values.into_vec())
    }

    fn last(&self) -> usize {
        self.placement.last().copied().unwrap_or(0)
    }
}
