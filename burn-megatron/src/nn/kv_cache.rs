//! The KV cache for generation.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::rope::{Positions, RopeTable};

use super::context::CacheSplit;
use super::kv_buffer::{Extent, KvBuffer};
use super::moe::{RoutedTokens, TokenPositions};
use super::real_tokens::RealTokens;
use crate::collective::Comm;

/// The KV cache of the attention layers of one rank, for several sequences of different lengths.
///
/// Each sequence has its own buffers, so that results do not depend on other sequences. Buffers grow up to the capacity
/// of the cache. A layer with a sliding window keeps the tokens in the window, and at most 191 tokens before the
/// window.
///
/// Each forward pass processes new tokens of some of the sequences, in these steps:
///
/// 1. Call [`read`](Self::read) with the number of new tokens per sequence.
/// 2. Run the forward pass. Each layer appends the new tokens after the first [`len`](Self::len) tokens of the
///    sequence.
/// 3. Call [`set_len`](Self::set_len) to set the new length of each sequence.
///
/// If the keys depend on the length of the text, as in LongRoPE, first call [`begin`](Self::begin) with this length.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::{AttentionContext, KvCache, ParallelAttentionConfig, SequencePart};
/// use burn_megatron::prelude::*;
///
/// let device = Device::flex();
/// let builder = ModelBuilder::new(&ParallelContext::single(), &device);
/// let attention = ParallelAttentionConfig::new(8, 2, 2, 4).init(&builder)?;
/// let mut cache = KvCache::new(1, 16);
/// for count in [3, 1] {
///     let (sequence, len) = (0, cache.len(0));
///     cache.read(&[SequencePart { sequence, count }], count);
///     let x = Tensor::ones([1, count, 8], &device);
///     let context = AttentionContext::Cached(cache.layer(0));
///     assert_eq!(attention.forward_with_context(x, None, context).dims(), [1, count, 8]);
///     cache.set_len(sequence, len + count);
/// }
/// assert_eq!(cache.len(0), 4);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    sequences: BTreeMap<usize, CachedSequence>,
    /// The number of visible tokens before each token, per layer. `None` if all earlier tokens are visible.
    windows: Vec<Option<usize>>,
    capacity: usize,
    /// The length of a text above which its keys change.
    rereads_after: Option<usize>,
    /// The split over a context group.
    split: Option<CacheSplit>,
    reading: Reading,
}

#[derive(Debug)]
struct CachedSequence {
    len: usize,
    /// The length of the text, as announced by [`begin`](KvCache::begin).
    text: usize,
    layers: Vec<KvBuffer>,
}

/// The new tokens of one or more sequences, concatenated into one row `[1, tokens]`, followed by padding.
#[derive(Clone, Debug)]
pub struct NewTokens {
    /// The token ids: `[1, tokens]`.
    pub ids: Tensor<2, Int>,
    /// The number of new tokens of each sequence, in the order of `ids`. Each sequence occurs at most once.
    pub parts: Vec<SequencePart>,
}

/// The number of new tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequencePart {
    /// The id of the sequence, which the caller chooses.
    pub sequence: usize,
    /// The number of new tokens.
    pub count: usize,
}

/// The tokens that a forward pass reads.
#[derive(Clone, Debug, Default)]
struct Reading {
    parts: Vec<SequencePart>,
    /// The positions of the tokens that this rank reads. The position of padding is 0.
    positions: Vec<i32>,
    /// Whether the logits are not needed.
    is_prefill: bool,
    /// Whether these are only this rank's share of the tokens of a single sequence.
    is_share: bool,
}

impl KvCache {
    /// Creates an empty cache for `layers` attention layers without sliding windows, with up to `capacity` tokens per
    /// sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self::with_windows(vec![None; layers], capacity)
    }

    /// Creates an empty cache for layers with sliding windows, with up to `capacity` tokens per sequence. `windows` has
    /// one element per layer: the number of earlier tokens that a token attends to, or `None` for all earlier tokens.
    pub fn with_windows(windows: Vec<Option<usize>>, capacity: usize) -> Self {
        Self {
            sequences: BTreeMap::new(),
            windows,
            capacity,
            rereads_after: None,
            split: None,
            reading: Reading::default(),
        }
    }

    /// Sets the text length at which the keys of all tokens change, as in LongRoPE. If a text becomes longer than
    /// `length`, the cache drops the tokens of the text, and the complete text must be processed again.
    pub fn with_rereads_after(mut self, length: Option<usize>) -> Self {
        self.rereads_after = length;
        self
    }

    /// Splits the cache over the `n` ranks of a context group. Each rank holds every `n`-th token of a sequence. All
    /// ranks of the group must make the same calls.
    pub fn over_context(mut self, context: &Comm) -> Self {
        self.split = (context.size() > 1).then(|| CacheSplit {
            comm: context.clone(),
        });
        self
    }

    /// Returns the number of ranks over which the cache is split, or 1 if the cache is not split.
    pub fn ranks(&self) -> usize {
        self.split.as_ref().map_or(1, |split| split.comm.size())
    }

    /// Sets the number of new tokens per sequence for the next forward pass. `parts` contains these numbers, and
    /// `tokens` is the total number of tokens, including padding.
    ///
    /// # Panics
    ///
    /// If `parts` has more than `tokens` tokens in total, or if a sequence exceeds the capacity of the cache.
    pub fn read(&mut self, parts: &[SequencePart], tokens: usize) {
        let mut positions = vec![];
        for part in parts {
            let first = self.len(part.sequence);
            assert!(
                first + part.count <= self.capacity,
                "a cache with a capacity of {} tokens holds {first}: {} more do not fit",
                self.capacity,
                part.count
            );
            positions.extend((first..first + part.count).map(|position| position as i32));
        }
        assert!(
            positions.len() <= tokens,
            "{} tokens of sequences in {tokens}",
            positions.len()
        );
        positions.resize(tokens, 0);
        self.reading = Reading {
            parts: parts.to_vec(),
            positions,
            ..Reading::default()
        };
    }

    /// Does the same as [`read`](Self::read), for tokens whose logits are not needed.
    pub(crate) fn read_prefill(&mut self, new: &NewTokens) {
        self.read(&new.parts, new.ids.dims()[1]);
        self.reading.is_prefill = true;
    }

    /// Reads new tokens of one sequence and returns the ids of this rank's share. The number of tokens must be a
    /// multiple of [`ranks`](Self::ranks). Without a context group, returns all ids.
    pub(crate) fn read_share(&mut self, new: &NewTokens) -> Tensor<2, Int> {
        self.read_prefill(new);
        let Some(split) = &self.split else {
            return new.ids.clone();
        };
        let [part] = &self.reading.parts[..] else {
            unreachable!("ranks share the tokens of one sequence")
        };
        assert!(
            part.count == self.reading.positions.len() && part.count.is_multiple_of(self.ranks()),
            "{} ranks read {} tokens: expected a multiple, without padding",
            self.ranks(),
            part.count
        );
        let first = self.len(part.sequence);
        let places: Vec<_> = split.own_places(first..first + part.count).collect();
        let own = places.iter().map(|place| (first + place) as i32);
        self.reading.positions = own.collect();
        self.reading.is_share = true;
        new.ids
            .clone()
            .select(1, indices(&places, &new.ids.device()))
    }

    /// Returns the padding and the positions of the tokens that this rank reads, for the routers of experts.
    pub(super) fn routed(&self) -> RoutedTokens {
        let reading = &self.reading;
        let tokens = reading.positions.len();
        let read = reading.parts.iter().map(|part| part.count).sum::<usize>();
        let is_real = (0..tokens).map(|token| reading.is_share || token < read);
        let positions = TokenPositions::Each(reading.positions.clone().into());
        RoutedTokens::new(
            [1, tokens],
            positions,
            RealTokens::new(is_real.collect(), 1),
        )
    }

    /// Returns the positions of this part of the tokens that this rank reads.
    pub(super) fn position_numbers(&self, part: Range<usize>) -> &[i32] {
        &self.reading.positions[part]
    }

    /// Returns the length of a sequence, in tokens.
    pub fn len(&self, sequence: usize) -> usize {
        let cached = self.sequences.get(&sequence);
        cached.map_or(0, |cached| cached.len)
    }

    /// Returns the maximum length of a sequence, in tokens.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length of a sequence. Set a larger length after a forward pass has appended tokens, or a smaller length
    /// to drop the last tokens.
    pub fn set_len(&mut self, sequence: usize, len: usize) {
        let cached = self.sequence(sequence);
        cached.len = len;
        if len == 0 {
            cached.layers.iter_mut().for_each(KvBuffer::clear);
        }
    }

    /// Prepares the cache for a text of `text` tokens whose first `same` tokens may already be in the cache. Returns
    /// the number of tokens that stay in the cache. This number is `same`, or 0 in these cases:
    ///
    /// - a layer has already dropped tokens that its sliding window needs;
    /// - the length of the text has crossed [the length above which the keys change](Self::with_rereads_after).
    pub fn begin(&mut self, sequence: usize, same: usize, text: usize) -> usize {
        let is_long = |text: usize| self.rereads_after.is_some_and(|length| text > length);
        let has_same_keys = is_long(self.text(sequence)) == is_long(text);
        let kept = if has_same_keys {
            self.kept(sequence, same)
        } else {
            0
        };
        self.set_len(sequence, kept);
        self.sequence(sequence).text = text;
        kept
    }

    /// Returns the text length above which a text must be [processed again](Self::with_rereads_after).
    pub(crate) fn rereads_after(&self) -> Option<usize> {
        self.rereads_after
    }

    fn text(&self, sequence: usize) -> usize {
        let cached = self.sequences.get(&sequence);
        cached.map_or(0, |cached| cached.text)
    }

    /// Returns `len` if the sequence can continue after its first `len` tokens. Returns 0 if a layer has dropped
    /// tokens that are in its window.
    fn kept(&self, sequence: usize, len: usize) -> usize {
        let Some(cached) = self.sequences.get(&sequence) else {
            return 0;
        };
        let layers = cached.layers.iter().zip(&self.windows);
        let has_all = |(layer, window): (&KvBuffer, &Option<usize>)| {
            layer.has(self.own(first_seen(len, *window)), self.own(len))
        };
        if layers.into_iter().all(has_all) {
            len
        } else {
            0
        }
    }

    /// Returns the number of tokens that this rank holds among the first `len` tokens.
    fn own(&self, len: usize) -> usize {
        self.split.as_ref().map_or(len, |split| split.own(len))
    }

    /// Returns the size of the cache on this rank, in bytes.
    pub fn bytes(&self) -> usize {
        let layers = self.sequences.values().flat_map(|cached| &cached.layers);
        layers.map(KvBuffer::bytes).sum()
    }

    /// Returns the cache of an attention layer. `index` is the index of the layer among the attention layers of this
    /// rank.
    ///
    /// # Panics
    ///
    /// If the cache has no layer with this index.
    pub fn layer(&mut self, index: usize) -> LayerKvCache<'_> {
        assert!(
            index < self.windows.len(),
            "layer {index} of a cache of {} layers",
            self.windows.len()
        );
        LayerKvCache { cache: self, index }
    }

    fn sequence(&mut self, sequence: usize) -> &mut CachedSequence {
        let layers = self.windows.len();
        let new = || CachedSequence {
            len: 0,
            text: 0,
            layers: vec![KvBuffer::default(); layers],
        };
        self.sequences.entry(sequence).or_insert_with(new)
    }
}

/// Returns the first position that is visible to the token at `position`.
fn first_seen(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| position.saturating_sub(window))
}

/// The KV cache of one layer. It holds keys and values, or the latents from which keys and values are computed.
#[derive(Debug)]
pub struct LayerKvCache<'a> {
    cache: &'a mut KvCache,
    index: usize,
}

impl LayerKvCache<'_> {
    /// Returns the rows of a rotary table for the tokens that this rank reads.
    ///
    /// # Panics
    ///
    /// If the new length of a sequence requires other rows and [`KvCache::begin`] was not called.
    pub(super) fn positions(&self, table: &RopeTable, device: &Device) -> Positions {
        let reading = &self.cache.reading;
        let tokens = reading.positions.len();
        match reading.parts[..] {
            [part] if part.count == tokens && !reading.is_share => {
                Positions::From(self.first_row(part, table) + self.cache.len(part.sequence))
            }
            _ => {
                let mut rows = reading.positions.clone();
                let mut from = 0;
                for part in &reading.parts {
                    let count = if reading.is_share { tokens } else { part.count };
                    let first = self.first_row(*part, table) as i32;
                    rows[from..from + count]
                        .iter_mut()
                        .for_each(|row| *row += first);
                    from += count;
                }
                let rows = TensorData::new(rows, [1, tokens]);
                Positions::Each(Tensor::from_data(rows, device))
            }
        }
    }

    /// Returns the row of position 0 of a sequence.
    fn first_row(&self, part: SequencePart, table: &RopeTable) -> usize {
        let first = self.cache.len(part.sequence);
        let text = self.cache.text(part.sequence);
        let row = table.first_row(text.max(first + part.count));
        assert!(
            first == 0 || table.first_row(text.max(first)) == row,
            "the keys of the {first} tokens in the cache change after {} more: expected KvCache::begin before",
            part.count
        );
        row
    }

    /// Computes the attention of each sequence separately. `attend` gets the inputs `[1, count, ..]` of one sequence
    /// and returns `[1, count, features]`. The outputs are concatenated in input order. The outputs of padding are
    /// zeros.
    pub(super) fn each_sequence<const N: usize>(
        mut self,
        inputs: [Tensor<3>; N],
        mut attend: impl FnMut([Tensor<3>; N], SequenceKvCache<'_>) -> Tensor<3>,
    ) -> Tensor<3> {
        let [_, tokens, _] = inputs[0].dims();
        let reading = self.cache.reading.clone();
        let (mut outputs, mut from) = (vec![], 0);
        for part in &reading.parts {
            let count = if reading.is_share { tokens } else { part.count };
            let own = inputs.clone().map(|x| {
                if count == tokens {
                    x
                } else {
                    x.narrow(1, from, count)
                }
            });
            from += count;
            outputs.push(attend(own, self.sequence(*part)));
        }
        if let (true, Some(last)) = (from < tokens, outputs.last()) {
            let [_, _, features] = last.dims();
            let options = (&last.device(), last.dtype());
            outputs.push(Tensor::zeros([1, tokens - from, features], options));
        }
        match outputs.len() {
            1 => outputs.swap_remove(0),
            _ => Tensor::cat(outputs, 1),
        }
    }

    /// Returns the cache of one of the sequences that are read.
    fn sequence(&mut self, part: SequencePart) -> SequenceKvCache<'_> {
        let (cache, index) = (&mut *self.cache, self.index);
        let (first, window) = (cache.len(part.sequence), cache.windows[index]);
        let end = first + part.count;
        let extent = Extent {
            first: cache.own(first),
            end: cache.own(end),
            seen: cache.own(first_seen(first, window)),
            seen_later: cache.own(first_seen(end, window)),
            window: window.map(|window| cache.own(window + 1)),
            capacity: cache.own(cache.capacity),
        };
        SequenceKvCache {
            first,
            end,
            is_prefill: cache.reading.is_prefill,
            is_share: cache.reading.is_share,
            split: cache.split.clone(),
            extent,
            layer: &mut cache.sequence(part.sequence).layers[index],
        }
    }
}

/// The keys and values of one layer and one sequence.
#[derive(Debug)]
pub(super) struct SequenceKvCache<'a> {
    /// The position of the first new token.
    pub first: usize,
    end: usize,
    /// Whether this forward pass is a prefill, so that the logits of the new tokens are not needed.
    pub is_prefill: bool,
    is_share: bool,
    split: Option<CacheSplit>,
    extent: Extent,
    layer: &'a mut KvBuffer,
}

impl SequenceKvCache<'_> {
    /// Returns how the cache is split over ranks, and whether the new tokens are only this rank's share.
    pub fn split(&self) -> Option<(CacheSplit, bool)> {
        Some((self.split.clone()?, self.is_share))
    }

    /// Appends tensors `[1, new, groups, width]` of new tokens, such as keys and values. Returns the tensors of all
    /// tokens that are visible to the new tokens.
    pub fn extend<const N: usize>(self, new: [Tensor<4>; N]) -> [Tensor<4>; N] {
        self.layer.extend(new, self.extent).0
    }

    /// Appends this rank's part of the new tokens to a split cache. `new` are the tensors of all new tokens, or of this
    /// rank's share. Returns the visible tokens of this rank and the index of the first one, or `None` if no token is
    /// visible.
    pub fn extend_own<const N: usize>(
        self,
        split: &CacheSplit,
        new: [Tensor<4>; N],
    ) -> Option<([Tensor<4>; N], usize)> {
        let places: Vec<_> = split.own_places(self.first..self.end).collect();
        if places.is_empty() {
            return self.layer.filled(self.extent);
        }
        let own = |x: Tensor<4>| {
            let index = indices(&places, &x.device());
            x.select(1, index)
        };
        let new = if self.is_share { new } else { new.map(own) };
        Some(self.layer.extend(new, self.extent))
    }
}

fn indices(places: &[usize], device: &Device) -> Tensor<1, Int> {
    let places: Vec<_> = places.iter().map(|place| *place as i32).collect();
    Tensor::from_data(&places[..], device)
}
