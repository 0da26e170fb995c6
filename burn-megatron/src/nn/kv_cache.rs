//! Cache of keys and values for generation.

use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::rope::{Positions, RopeTable};

use super::context::CacheSplit;
use super::kv_buffer::{Extent, KvBuffer};
use super::moe::{RoutedTokens, TokenPositions};
use super::real_tokens::RealTokens;
use crate::collective::Comm;

/// Keys and values of the layers of one rank, for sequences of any length.
///
/// Each sequence has its own buffers, so that results do not depend on other sequences. Buffers grow up to the
/// maximum sequence length of the model. A layer with a window keeps the tokens in the window, and at most 191 tokens
/// before it.
///
/// A forward reads new tokens of some sequences. [`read`](Self::read) names them, the layers append them after the
/// first [`len`](Self::len) tokens of each sequence, and [`set_len`](Self::set_len) sets the new lengths. If the keys
/// depend on the text length, as in LongRoPE, [`begin`](Self::begin) must announce the length first.
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
    /// The number of visible tokens before each token, per layer. `None`: all tokens.
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

/// New tokens of sequences, `[1, tokens]`: the tokens of each sequence in order, followed by padding.
#[derive(Clone, Debug)]
pub struct NewTokens {
    /// The token ids: `[1, tokens]`.
    pub ids: Tensor<2, Int>,
    /// The parts of the sequences. Each sequence occurs once.
    pub parts: Vec<SequencePart>,
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequencePart {
    /// The number of the sequence, chosen by the caller.
    pub sequence: usize,
    /// The number of tokens.
    pub count: usize,
}

/// The tokens that a forward reads.
#[derive(Clone, Debug, Default)]
struct Reading {
    parts: Vec<SequencePart>,
    /// The positions of the tokens that this rank reads; 0 for padding.
    positions: Vec<i32>,
    /// Whether the logits are not needed.
    is_prefill: bool,
    /// Whether these are only this rank's share of the tokens of a single sequence.
    is_share: bool,
}

impl KvCache {
    /// Creates an empty cache for `layers` layers and up to `capacity` tokens per sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self::with_windows(vec![None; layers], capacity)
    }

    /// Creates an empty cache with a window per layer: the number of visible tokens before each token. `None`: all
    /// tokens.
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

    /// Sets the text length above which all keys change. A text that grows beyond `length` is read again.
    pub fn with_rereads_after(mut self, length: Option<usize>) -> Self {
        self.rereads_after = length;
        self
    }

    /// Splits the cache over the ranks of a context group. Each rank holds every `context`-th token. All ranks of the
    /// group must make the same calls.
    pub fn over_context(mut self, context: &Comm) -> Self {
        self.split = (context.size() > 1).then(|| CacheSplit {
            comm: context.clone(),
        });
        self
    }

    /// Returns the number of ranks that share a text.
    pub fn ranks(&self) -> usize {
        self.split.as_ref().map_or(1, |split| split.comm.size())
    }

    /// Sets the new tokens of the next forward. `tokens` is their number including padding.
    ///
    /// # Panics
    ///
    /// If `parts` have more than `tokens` tokens, or if the capacity is exceeded.
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

    /// Sets the length of a sequence: to a larger value after a forward, or to a smaller value to drop the last
    /// tokens.
    pub fn set_len(&mut self, sequence: usize, len: usize) {
        let cached = self.sequence(sequence);
        cached.len = len;
        if len == 0 {
            cached.layers.iter_mut().for_each(KvBuffer::clear);
        }
    }

    /// Begins to read a text of `text` tokens. The cache may hold the first `same` tokens. Keeps these tokens and
    /// returns `same`, or keeps nothing and returns 0 in two cases:
    ///
    /// - a layer has dropped tokens that are in its window;
    /// - the text has grown or shrunk across [the length that changes its keys](Self::with_rereads_after).
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

    /// Returns the longest text that is [read again](Self::with_rereads_after) when it grows.
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

    /// Returns how many of the first `len` tokens this rank holds.
    fn own(&self, len: usize) -> usize {
        self.split.as_ref().map_or(len, |split| split.own(len))
    }

    /// Returns the size of the cache on this rank, in bytes.
    pub fn bytes(&self) -> usize {
        let layers = self.sequences.values().flat_map(|cached| &cached.layers);
        layers.map(KvBuffer::bytes).sum()
    }

    /// Returns the cache of layer `index` of this rank.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
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

/// The cached tensors of one layer: keys and values, or the latents that they are computed from.
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

    /// Attends sequence by sequence. `attend` gets the part `[1, count, ..]` of the inputs of one sequence and
    /// returns `[1, count, features]`. The outputs are concatenated in input order. Padding gives zeros.
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
    /// Whether the logits of the new tokens are not needed.
    pub is_prefill: bool,
    is_share: bool,
    split: Option<CacheSplit>,
    extent: Extent,
    layer: &'a mut KvBuffer,
}

impl SequenceKvCache<'_> {
    /// Returns the split of the cache, and whether the new tokens are this rank's share.
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
