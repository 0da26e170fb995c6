//! Cache of keys and values for generation.

use std::ops::Range;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::rope::Positions;

use super::context::CacheSplit;
use crate::collective::Comm;

/// The cache grows by this many tokens.
const GROWTH_TOKENS: usize = 256;

/// Keys and values of the layers of one rank, for sequences of equal length.
///
/// It grows up to the model's longest sequence. All layers hold the same tokens: a forward writes after
/// the first [`len`](Self::len) tokens, and [`set_len`](Self::set_len) sets the new length.
#[derive(Debug)]
pub struct KvCache {
    /// Of each layer its tensors `[sequences, allocated, .., ..]`; none before its first token.
    layers: Vec<Vec<Tensor<4>>>,
    capacity: usize,
    len: usize,
    /// Over a context group.
    split: Option<CacheSplit>,
    /// The new tokens of this rank, while it reads only those.
    part: Option<NewTokens>,
}

/// New tokens of each sequence that one rank of a context group reads, `[sequences, part]`.
#[derive(Clone, Debug)]
struct NewTokens {
    sequences: usize,
    /// Their positions.
    numbers: Vec<i32>,
}

impl KvCache {
    /// An empty cache of `layers` layers, for at most `capacity` tokens per sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self {
            layers: vec![vec![]; layers],
            capacity,
            len: 0,
            split: None,
            part: None,
        }
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

    /// Returns what `read` returns for this rank's part of new tokens `[sequences, new]`, where `new` is a multiple of
    /// [`ranks`](Self::ranks); the other ranks read the others.
    pub(crate) fn read_part<T>(
        &mut self,
        ids: Tensor<2, Int>,
        read: impl FnOnce(Tensor<2, Int>, &mut Self) -> T,
    ) -> T {
        let Some(split) = &self.split else {
            return read(ids, self);
        };
        let [sequences, count] = ids.dims();
        assert!(
            count.is_multiple_of(self.ranks()),
            "{} ranks read {count} tokens: expected a multiple",
            self.ranks()
        );
        let places: Vec<_> = split.own_places(self.len..self.len + count).collect();
        let numbers = places.iter().map(|place| (self.len + place) as i32);
        self.part = Some(NewTokens {
            sequences,
            numbers: numbers.collect(),
        });
        let own = ids.clone().select(1, indices(&places, &ids.device()));
        let result = read(own, self);
        self.part = None;
        result
    }

    /// The positions of this part of the new tokens of each sequence, if this rank reads only some of them.
    pub(super) fn position_numbers(&self, part: Range<usize>) -> Option<Vec<i32>> {
        let new = self.part.as_ref()?;
        Some(new.numbers[part].repeat(new.sequences))
    }

    /// The length of a sequence, in tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The maximum length of a sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length to `len`: larger after a forward, smaller to drop the last tokens.
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    /// Its size on this rank in bytes.
    pub fn bytes(&self) -> usize {
        let tensors = self.layers.iter().flatten();
        tensors
            .map(|x| x.dims().iter().product::<usize>() * x.dtype().size())
            .sum()
    }

    /// The cache of layer `index` of this rank.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn layer(&mut self, index: usize) -> LayerKvCache<'_> {
        LayerKvCache {
            first: self.len,
            capacity: self.capacity,
            split: self.split.as_ref(),
            part: self.part.as_ref(),
            tensors: &mut self.layers[index],
        }
    }
}

/// The keys and values of one layer, or what they are computed from.
#[derive(Debug)]
pub struct LayerKvCache<'a> {
    /// The position of the next token.
    first: usize,
    capacity: usize,
    split: Option<&'a CacheSplit>,
    part: Option<&'a NewTokens>,
    /// `[sequences, allocated, groups, width]` each.
    tensors: &'a mut Vec<Tensor<4>>,
}

impl LayerKvCache<'_> {
    /// The position of the next token.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The positions of the new tokens.
    pub(super) fn positions(&self, device: &Device) -> Positions {
        match self.part {
            None => Positions::From(self.first),
            Some(new) => {
                let numbers = new.numbers.repeat(new.sequences);
                let shape = [new.sequences, new.numbers.len()];
                Positions::Each(Tensor::from_data(TensorData::new(numbers, shape), device))
            }
        }
    }

    /// How the cache is split, and whether the new tokens are this rank's part of them.
    pub(super) fn split(&self) -> Option<(CacheSplit, bool)> {
        Some((self.split?.clone(), self.part.is_some()))
    }

    /// Appends what this rank has of `count` new tokens to a cache that is split, and returns that of all of its tokens, if
    /// it has any. `new` are the tensors of all new tokens, or of this rank's part.
    ///
    /// # Panics
    ///
    /// As [`extend`](Self::extend).
    pub(super) fn extend_own<const N: usize>(
        mut self,
        split: &CacheSplit,
        new: [Tensor<4>; N],
        count: usize,
    ) -> Option<[Tensor<4>; N]> {
        let (first, end) = (self.first, self.first + count);
        self.check(count);
        let places: Vec<_> = split.own_places(first..end).collect();
        let is_part = self.part.is_some();
        self.first = split.own(first);
        self.capacity = split.own(self.capacity);
        if places.is_empty() {
            return self.filled(split.own(end));
        }
        let own = |x: Tensor<4>| {
            let index = indices(&places, &x.device());
            x.select(1, index)
        };
        Some(self.extend(if is_part { new } else { new.map(own) }))
    }

    /// What there is of the first tokens.
    fn filled<const N: usize>(&self, tokens: usize) -> Option<[Tensor<4>; N]> {
        let tensors = <[Tensor<4>; N]>::try_from(self.tensors.clone()).ok();
        let tensors = tensors.filter(|_| tokens > 0)?;
        Some(tensors.map(|x| x.narrow(1, 0, tokens)))
    }

    fn check(&self, count: usize) {
        let first = self.first;
        assert!(
            first + count <= self.capacity,
            "a cache with a capacity of {} tokens holds {first}: {count} more do not fit",
            self.capacity
        );
    }

    /// Appends tensors of new tokens, such as their keys and values, `[sequences, new, groups, width]`, and returns those
    /// of all tokens: `[sequences, first + new, groups, width]`.
    ///
    /// # Panics
    ///
    /// If the capacity is exceeded, or the number of sequences differs.
    pub(super) fn extend<const N: usize>(self, new: [Tensor<4>; N]) -> [Tensor<4>; N] {
        let [sequences, count, ..] = new[0].dims();
        let (first, end) = (self.first, self.first + count);
        self.check(count);
        if let Some(old) = self.tensors.first() {
            assert_eq!(
                sequences,
                old.dims()[0],
                "the number of sequences must be that of the cache"
            );
        }
        let mut old = std::mem::take(self.tensors).into_iter();
        let written = new.map(|new| {
            let [_, _, groups, width] = new.dims();
            let allocated = self.grow(old.next(), &new, end);
            allocated.slice_assign([0..sequences, first..end, 0..groups, 0..width], new)
        });
        *self.tensors = written.to_vec();
        written.map(|x| x.narrow(1, 0, end))
    }

    /// A tensor for at least `end` tokens with the content of `old`, which is reused if it is large enough.
    fn grow(&self, old: Option<Tensor<4>>, new: &Tensor<4>, end: usize) -> Tensor<4> {
        let old = match old {
            Some(old) if end <= old.dims()[1] => return old,
            old => old,
        };
        let [sequences, _, groups, width] = new.dims();
        let tokens = end.next_multiple_of(GROWTH_TOKENS).min(self.capacity);
        let options = (&new.device(), new.dtype());
        let grown = Tensor::zeros([sequences, tokens, groups, width], options);
        let content = [0..sequences, 0..self.first, 0..groups, 0..width];
        match old {
            Some(old) if self.first > 0 => grown.slice_assign(content.clone(), old.slice(content)),
            _ => grown,
        }
    }
}

fn indices(places: &[usize], device: &Device) -> Tensor<1, Int> {
    let places: Vec<_> = places.iter().map(|place| *place as i32).collect();
    Tensor::from_data(&places[..], device)
}
