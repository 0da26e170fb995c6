//! Runs this rank's part of a model on texts.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::GenerateError;
use burn_megatron::comm::{CommError, ParallelContext};
use burn_megatron::model::{GenerationCache, LanguageModel};
use burn_megatron::nn::{NewTokens, SequencePart};
use burn_megatron::pipeline::engine::{ForwardOptions, P2pConfig, ShapeCache, forward_only};

/// The number of tokens per rank in a chunk of a long prompt. Chunks limit the activation memory during prefill.
const PREFILL_CHUNK: usize = 512;

/// A model and its KV cache, with the tokens whose keys and values are in the cache.
#[derive(Debug)]
pub(super) struct Reader<'a, M: LanguageModel> {
    model: &'a M,
    groups: &'a ParallelContext,
    device: Device,
    /// The pipeline rank of each stage.
    pub placement: Vec<usize>,
    pub use_cache: bool,
    /// Whether the first multi-token prediction module also reads the tokens.
    pub drafts: bool,
    cache: M::Cache,
    /// The shapes of the activations in earlier forward passes.
    shapes: ShapeCache,
    /// The tokens of each sequence that are in the cache.
    cached: Vec<Vec<u32>>,
}

/// A text that the model reads.
#[derive(Clone, Debug)]
pub(super) struct TextToRead<'t> {
    /// The index of the sequence in the cache.
    pub sequence: usize,
    pub tokens: Cow<'t, [u32]>,
    /// The number of tokens at the end of the text whose logits are needed.
    pub last: usize,
}

/// The output of the model for the last tokens of some texts.
#[derive(Debug)]
pub(super) struct TextsRead {
    /// The hidden states on ranks that have the last pipeline stage, otherwise `None`.
    hidden: Option<Tensor<3>>,
    /// The range of positions of the last tokens of each text.
    rows: Vec<Range<usize>>,
    /// The texts, and the numbers of their tokens with padding.
    parts: Vec<SequencePart>,
    padded: usize,
}

impl TextsRead {
    /// Returns the number of last tokens of each text.
    pub fn counts(&self) -> impl ExactSizeIterator<Item = usize> {
        self.rows.iter().map(ExactSizeIterator::len)
    }
}

/// The tokens that each rank of a context-parallel group reads.
#[derive(Clone, Copy, Debug)]
enum Reading {
    /// Only the tokens of this rank's part.
    Prefill,
    /// All tokens, on every rank.
    Whole,
}

/// The new tokens of a sequence.
#[derive(Clone, Copy, Debug)]
struct NewPart<'t> {
    sequence: usize,
    tokens: &'t [u32],
    /// The token that follows each of the new tokens. It is not known for the last tokens of a text.
    next: &'t [u32],
}

impl<'t> NewPart<'t> {
    fn chunks(self, size: usize) -> impl Iterator<Item = Self> {
        let chunks = self.tokens.chunks(size).zip(self.next.chunks(size));
        chunks.map(move |(tokens, next)| Self {
            sequence: self.sequence,
            tokens,
            next,
        })
    }

    fn split_at(self, count: usize) -> [Self; 2] {
        let ((a, b), (next_a, next_b)) = (self.tokens.split_at(count), self.next.split_at(count));
        [(a, next_a), (b, next_b)].map(|(tokens, next)| Self {
            sequence: self.sequence,
            tokens,
            next,
        })
    }
}

impl<'a, M: LanguageModel> Reader<'a, M> {
    /// Creates a reader. Pipeline stage `s` is on pipeline rank `s`.
    pub fn new(model: &'a M, groups: &'a ParallelContext, device: &Device) -> Self {
        Self {
            model,
            groups,
            device: device.clone().inner(),
            placement: (0..groups.pipeline().size()).collect(),
            use_cache: true,
            drafts: false,
            cache: M::Cache::new(model).over_context(groups.context()),
            shapes: ShapeCache::default(),
            cached: vec![],
        }
    }

    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Returns the maximum length of a text that may use a draft. This is the context length of the model, or the
    /// length beyond which the cache requires reading the text again.
    pub fn room(&self, text: usize) -> usize {
        let rereads_after = self.cache.rereads_after();
        let rereads_after = rereads_after.filter(|length| text <= *length);
        rereads_after
            .unwrap_or(usize::MAX)
            .min(self.model.context())
    }

    /// Enables or disables drafting. If the setting changes, the tokens are read again.
    pub fn set_speculative(&mut self, speculative: bool) -> Result<(), GenerateError> {
        if speculative && !self.cache.can_draft(self.model) {
            return Err(GenerateError::NoDrafts);
        }
        if speculative != self.drafts {
            self.drafts = speculative;
            for (sequence, cached) in self.cached.iter_mut().enumerate() {
                cached.clear();
                self.cache.set_len(sequence, 0);
            }
        }
        Ok(())
    }

    /// Checks that a text is not empty and that its tokens are in the vocabulary.
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

    /// Reads the tokens of the texts that are not in the cache. If a text exceeds the context length of the model, only
    /// its last tokens are read. The results are in the order of the texts. With [drafts](Self::drafts), the caller
    /// must call [`draft`](Self::draft) for each result.
    pub fn read(&mut self, texts: &[TextToRead<'_>]) -> Result<Vec<TextsRead>, CommError> {
        let context = self.model.context();
        let (mut earlier, mut newest) = (vec![], vec![]);
        for text in texts {
            let tokens = &text.tokens;
            let seen = &tokens[tokens.len().saturating_sub(context)..];
            let (before, last) = seen.split_at(seen.len() - text.last);
            let sequence = text.sequence;
            let begin = self.begin(sequence, before, seen.len());
            earlier.push(NewPart {
                sequence,
                tokens: &before[begin..],
                next: &seen[begin + 1..=before.len()],
            });
            newest.push(NewPart {
                sequence,
                tokens: last,
                next: &[],
            });
        }
        self.prefill(earlier)?;
        // The last tokens of all texts are read in a separate call. Only the logits of that call are used.
        let at_once = self.cache.max_sequences();
        newest
            .chunks(at_once)
            .map(|parts| self.forward(parts, Reading::Whole))
            .collect()
    }

    /// Keeps the cached tokens of a sequence that match the beginning of `text`, which will have `length` tokens.
    /// Returns the number of kept tokens.
    fn begin(&mut self, sequence: usize, text: &[u32], length: usize) -> usize {
        let count = self.cached.len().max(sequence + 1);
        self.cached.resize(count, vec![]);
        let cached = &mut self.cached[sequence];
        let same = cached.iter().zip(text).take_while(|(a, b)| a == b);
        let same = if self.use_cache { same.count() } else { 0 };
        let kept = self.cache.begin(sequence, same, length);
        cached.truncate(kept);
        kept
    }

    /// Reads tokens whose logits are not needed. A text is divided into the same chunks as in a batch of one text.
    /// Short chunks of several texts are read together.
    fn prefill(&mut self, texts: Vec<NewPart<'_>>) -> Result<(), CommError> {
        let ranks = self.cache.prefill_multiple();
        let multiple = self.model.sequence_multiple();
        let mut together: Vec<NewPart<'_>> = vec![];
        for text in texts {
            // Tokens that cannot be divided evenly over the ranks of the context group are read by each of these ranks.
            let divided = match ranks {
                1 => 0,
                _ => text.tokens.len() / (ranks * multiple) * (ranks * multiple),
            };
            let [divided, rest] = text.split_at(divided);
            for chunk in divided.chunks(PREFILL_CHUNK.next_multiple_of(multiple) * ranks) {
                self.forward(&[chunk], Reading::Prefill)?;
            }
            for chunk in rest.chunks(PREFILL_CHUNK) {
                let count: usize = together.iter().map(|part| part.tokens.len()).sum();
                let is_full = count + chunk.tokens.len() > PREFILL_CHUNK
                    || together.len() == self.cache.max_sequences();
                if is_full {
                    self.prefill_together(&std::mem::take(&mut together), ranks)?;
                }
                together.push(chunk);
            }
        }
        self.prefill_together(&together, ranks)
    }

    fn prefill_together(&mut self, parts: &[NewPart<'_>], ranks: usize) -> Result<(), CommError> {
        let reading = match ranks {
            1 => Reading::Prefill,
            _ => Reading::Whole,
        };
        if !parts.is_empty() {
            self.forward(parts, reading)?;
        }
        Ok(())
    }

    /// Runs the model on new tokens. If drafting is enabled and the next tokens are known, also runs the first
    /// multi-token prediction module.
    fn forward(&mut self, parts: &[NewPart<'_>], reading: Reading) -> Result<TextsRead, CommError> {
        let ids: Vec<_> = parts.iter().flat_map(|part| part.tokens).copied().collect();
        let padded = ids.len().next_multiple_of(self.model.sequence_multiple());
        let part = |part: &NewPart<'_>| SequencePart {
            sequence: part.sequence,
            count: part.tokens.len(),
        };
        let parts_read: Vec<_> = parts.iter().map(part).collect();
        let new = self.new_tokens(&ids, &parts_read, padded);
        let (model, cache) = (self.model, &mut self.cache);
        let last = cache.last_rows(&new);
        let pipeline = self.groups.pipeline();
        // A cache may read complete texts again, up to their last rows. A prefill may divide the tokens over ranks.
        let rows = last.last().map_or(0, |row| row + 1);
        let options = ForwardOptions {
            shape_key: [rows, 2 * padded + reading as usize],
            p2p: P2pConfig::of(self.groups.config()),
            shapes: self.shapes.clone(),
        };
        let run = |stage, input| match reading {
            Reading::Prefill => cache.prefill(model, stage, input, &new),
            Reading::Whole => cache.hidden(model, stage, input, &new),
        };
        let hidden = forward_only(&self.placement, pipeline, &self.device, options, run)?;
        let next: Vec<_> = parts.iter().flat_map(|part| part.next).copied().collect();
        let waits_for_next = self.drafts && next.is_empty();
        if let (true, false, Some(hidden)) = (self.drafts, waits_for_next, &hidden) {
            let next = self.new_tokens(&next, &parts_read, padded);
            let is_prefill = matches!(reading, Reading::Prefill);
            self.cache
                .draft(self.model, hidden.clone(), &next, is_prefill);
        }
        for part in parts {
            let cached = &mut self.cached[part.sequence];
            cached.extend(part.tokens);
            if !waits_for_next {
                self.cache.set_len(part.sequence, cached.len());
            }
        }
        let rows = last
            .iter()
            .zip(&parts_read)
            .map(|(row, part)| row + 1 - part.count..row + 1);
        Ok(TextsRead {
            hidden,
            rows: rows.collect(),
            parts: parts_read,
            padded,
        })
    }

    fn new_tokens(&self, ids: &[u32], parts: &[SequencePart], padded: usize) -> NewTokens {
        let mut ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        ids.resize(padded, 0);
        let data = TensorData::new(ids, [1, padded]);
        NewTokens {
            ids: Tensor::<2, Int>::from_data(data, &self.device),
            parts: parts.to_vec(),
        }
    }

    /// Runs the first multi-token prediction module on the last tokens of the texts. `next` contains the tokens that
    /// follow these last tokens: for each text, one token per kept last token, and at least one. Returns the logits of
    /// the token after them on ranks that have the last pipeline stage.
    pub fn draft(&mut self, read: &TextsRead, next: &[Vec<u32>]) -> Option<Vec<Vec<f64>>> {
        let mut ids = vec![];
        for (part, next) in read.parts.iter().zip(next) {
            // Values after a token that is not kept have no effect.
            ids.extend(next.iter().chain(&[0; 2]).take(part.count));
        }
        let new = self.new_tokens(&ids, &read.parts, read.padded);
        let (model, cache) = (self.model, &mut self.cache);
        let hidden = read.hidden.clone();
        let hidden = hidden.map(|hidden| cache.draft(model, hidden, &new, false));
        for (part, next) in read.parts.iter().zip(next) {
            let cached = &mut self.cached[part.sequence];
            cached.truncate(cached.len() - (part.count - next.len()));
            self.cache.set_len(part.sequence, cached.len());
        }
        let logits = model.logits_of(hidden?);
        let kept = read.rows.iter().zip(next);
        let kept = kept.map(|(rows, next)| row_of(&logits, rows.start + next.len() - 1));
        Some(kept.collect())
    }

    /// Returns the logits after each of the last tokens of each text, on ranks that have the last pipeline stage.
    pub fn logits(&self, read: &TextsRead) -> Option<Vec<Vec<Vec<f64>>>> {
        let logits = self.model.logits_of(read.hidden.clone()?);
        let of_text = |rows: &Range<usize>| rows.clone().map(|row| row_of(&logits, row)).collect();
        Some(read.rows.iter().map(of_text).collect())
    }

    /// Returns the log-probabilities of the tokens that follow the last tokens of each text, computed in the same way
    /// as the training loss. Returns an empty list on ranks without the last pipeline stage.
    pub fn logprobs(&self, read: &TextsRead, next: &[Vec<u32>]) -> Vec<Vec<f64>> {
        let Some(hidden) = read.hidden.clone() else {
            return vec![vec![]; next.len()];
        };
        let [_, part, _] = hidden.dims();
        let mut targets = vec![0; part * self.model.sequence_multiple()];
        for (rows, next) in read.rows.iter().zip(next) {
            for (row, token) in rows.clone().zip(next) {
                targets[row] = *token as i32;
            }
        }
        let targets = TensorData::new(targets.clone(), [1, targets.len()]);
        let targets = Tensor::<2, Int>::from_data(targets, &self.device);
        let losses = self.model.losses_of(hidden, targets);
        let cross_entropy = losses.parts.into_iter().next();
        let losses = cross_entropy.unwrap_or(losses.objective).into_data();
        let losses: Vec<f64> = losses.iter::<f64>().collect();
        let of_text = |(rows, next): (&Range<usize>, &Vec<u32>)| {
            let losses = &losses[rows.clone()][..next.len()];
            losses.iter().map(|loss| -loss).collect()
        };
        read.rows.iter().zip(next).map(of_text).collect()
    }

    /// Broadcasts the sampled tokens from the last pipeline stage to all ranks of the pipeline and context groups.
    pub fn share_tokens(&self, own: Vec<i64>) -> Result<Vec<i64>, CommError> {
        let tokens = self.groups.pipeline().broadcast(own.into(), self.last())?;
        let context = self.groups.context();
        Ok(context.broadcast(tokens, 0)?.into_vec())
    }

    /// Broadcasts the values from the last pipeline stage to all pipeline ranks.
    pub fn share_values(&self, own: Vec<f64>) -> Result<Vec<f64>, CommError> {
        let values = self.groups.pipeline().broadcast(own.into(), self.last())?;
        Ok(values.into_vec())
    }

    fn last(&self) -> usize {
        self.placement.last().copied().unwrap_or(0)
    }
}

/// Returns the logits at position `row` of a tensor `[1, rows, vocabulary]`.
fn row_of(logits: &Tensor<3>, row: usize) -> Vec<f64> {
    let row = logits.clone().narrow(1, row, 1).into_data();
    match row.as_slice::<f32>() {
        Ok(values) => values.iter().map(|value| f64::from(*value)).collect(),
        Err(_) => row.iter::<f64>().collect(),
    }
}
