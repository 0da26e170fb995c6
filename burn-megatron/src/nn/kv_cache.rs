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

/// Keys and values of the layers of one rank, for sequences of any lengths.
///
/// Each sequence has its own, so that nothing depends on the sequences beside it. They grow up to the model's longest
/// sequence; a layer with a window keeps the tokens in it, and at most 191 before them.
///
/// A forward reads new tokens of some sequences: [`read`](Self::read) names them, the layers write after the first
/// [`len`](Self::len) tokens of each, and [`set_len`](Self::set_len) sets the new lengths. If the length of a text changes
/// its keys, as in LongRoPE, [`begin`](Self::begin) must announce the length first.
#[derive(Debug)]
pub struct KvCache {
    sequences: BTreeMap<usize, CachedSequence>,
    /// Of each layer how many tokens before its own a token sees. None: all.
    windows: Vec<Option<usize>>,
    capacity: usize,
    /// The longest text whose keys a longer text does not share.
    rereads_after: Option<usize>,
    /// Over a context group.
    split: Option<CacheSplit>,
    reading: Reading,
}

#[derive(Debug)]
struct CachedSequence {
    len: usize,
    /// The length of the text that [`begin`](KvCache::begin) announced.
    text: usize,
    layers: Vec<KvBuffer>,
}

/// New tokens of sequences, `[1, tokens]`: those of one, those of the next, and so on, then padding.
#[derive(Clone, Debug)]
pub struct NewTokens {
    /// `[1, tokens]`
    pub ids: Tensor<2, Int>,
    /// The sequences, each once.
    pub parts: Vec<SequencePart>,
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequencePart {
    /// The number of the sequence, any.
    pub sequence: usize,
    /// The number of tokens.
    pub count: usize,
}

/// The tokens that a forward reads.
#[derive(Clone, Debug, Default)]
struct Reading {
    parts: Vec<SequencePart>,
    /// The positions of the tokens that this rank reads; 0 of padding.
    positions: Vec<i32>,
    /// Whether the logits are not needed.
    is_prefill: bool,
    /// Whether these are this rank's of the tokens only; of one sequence.
    is_share: bool,
}

impl KvCache {
    /// An empty cache of `layers` layers, for at most `capacity` tokens per sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self::with_windows(vec![None; layers], capacity)
    }

    /// The same, with the number of tokens before its own that a token sees in each layer; None: all.
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

    /// The same for a model in which a text of up to `length` tokens has other keys than a longer text. A text that grows
    /// beyond `length` is read again.
    pub fn with_rereads_after(mut self, length: Option<usize>) -> Self {
        self.rereads_after = length;
        self
    }

    /// The cache of a rank of a context group, which holds every `context`-th token. All ranks of the group must make
    /// the same calls.
    pub fn over_context(mut self, context: &Comm) -> Self {
        self.split = (context.size() > 1).then(|| CacheSplit {
            comm: context.clone(),
        });
        self
    }

    /// The ranks that share a text.
    pub fn ranks(&self) -> usize {
        self.split.as_ref().map_or(1, |split| split.comm.size())
    }

    /// The next forward reads these new tokens, which are `tokens` with padding.
    ///
    /// # Panics
    ///
    /// If there are more, or the capacity is exceeded.
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

    /// As [`read`](Self::read), for tokens that only the cache needs, not the logits.
    pub(crate) fn read_prefill(&mut self, new: &NewTokens) {
        self.read(&new.parts, new.ids.dims()[1]);
        self.reading.is_prefill = true;
    }

    /// This rank's share of new tokens of one sequence, of which the others read the others: the ids of a multiple of
    /// [`ranks`](Self::ranks) tokens. All of them on one rank.
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

    /// The positions of this part of the tokens that this rank reads.
    pub(super) fn position_numbers(&self, part: Range<usize>) -> &[i32] {
        &self.reading.positions[part]
    }

    /// The length of a sequence, in tokens.
    pub fn len(&self, sequence: usize) -> usize {
        let cached = self.sequences.get(&sequence);
        cached.map_or(0, |cached| cached.len)
    }

    /// The maximum length of a sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length of a sequence: larger after a forward, smaller to drop the last tokens.
    pub fn set_len(&mut self, sequence: usize, len: usize) {
        let cached = self.sequence(sequence);
        cached.len = len;
        if len == 0 {
            cached.layers.iter_mut().for_each(KvBuffer::clear);
        }
    }

    /// Begins to read a text of `text` tokens, of which the cache may hold the first `same`. Keeps these and returns
    /// `same`, or keeps nothing and returns 0 in two cases:
    ///
    /// - a layer has dropped tokens that are in its window then;
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

    /// The longest beginning of a sequence, up to `len` tokens, that it can go on from: all, or nothing where a layer has
    /// dropped what is in the window then.
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

    /// Returns the number of the first `len` tokens that this rank has.
    fn own(&self, len: usize) -> usize {
        self.split.as_ref().map_or(len, |split| split.own(len))
    }

    /// Its size on this rank in bytes.
    pub fn bytes(&self) -> usize {
        let layers = self.sequences.values().flat_map(|cached| &cached.layers);
        layers.map(KvBuffer::bytes).sum()
    }

    /// The cache of layer `index` of this rank.
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

/// The first position that the token at `position` sees.
fn first_seen(position: usize, window: Option<usize>) -> usize {
    window.map_or(0, |window| position.saturating_sub(window))
}

/// The keys and values of one layer, or what they are computed from.
#[derive(Debug)]
pub struct LayerKvCache<'a> {
    cache: &'a mut KvCache,
    index: usize,
}

impl LayerKvCache<'_> {
    /// Returns the rows of a table for the tokens that this rank reads.
    ///
    /// # Panics
    ///
    /// If a sequence has grown to other rows without [`KvCache::begin`].
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

    /// Attends sequence by sequence: `attend` is called with each one's part of the inputs, `[1, count, ..]`, and
    /// returns `[1, count, features]`. The outputs follow each other as the inputs do; padding gives zeros.
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

    /// The cache of one of the sequences that are read.
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

    /// Appends tensors of new tokens, such as their keys and values, `[1, new, groups, width]`, and returns those of all
    /// tokens that the first new one sees, and of the later ones.
    pub fn extend<const N: usize>(self, new: [Tensor<4>; N]) -> [Tensor<4>; N] {
        self.layer.extend(new, self.extent).0
    }

    /// Appends what this rank has of the new tokens to a cache that is split, and returns that of all of its tokens which
    /// the new ones see, and the number of the first among this rank's; none if it has none. `new` are the tensors of all
    /// new tokens, or of this rank's share.
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
