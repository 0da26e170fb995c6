//! The tokens of a batch that one rank of a context group holds.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::attention::{KeyRanges, Window};
use burn_megatron_kernels::rope::{Positions, RopeTable};
use parking_lot::Mutex;

use super::order::Order;
use crate::collective::{self, Comm};
use crate::mesh::{ContextSplit, ContextSplitError};
use crate::nn::RealTokens;

/// Ranks of a context group, as a range of their indices in the group.
pub(in crate::nn) type Members = Range<usize>;

/// The tokens of a batch `[batch, seq]` that one rank of a context group holds: `seq / context` tokens of each row,
/// in ascending order.
///
/// Tokens are numbered in the concatenated rows, from 0 to `batch * seq`. A token attends to the earlier tokens of its
/// document, which form a contiguous range. In any list of keys in ascending token order, the keys of these tokens are
/// therefore also contiguous ([`KeyRanges`]).
///
/// ```
/// use burn_megatron::mesh::ContextSplit;
/// use burn_megatron::nn::context::SequenceShard;
///
/// // Rank 0 of 2 has the first and the last of 4 chunks, as with `--cp 2`.
/// let shard = SequenceShard::new([1, 8], None, ContextSplit::Zigzag, (0, 2))?;
/// assert_eq!(shard.tokens(), [0, 1, 6, 7]);
/// assert_eq!(shard.local_shape(), [1, 4]);
/// assert_eq!(shard.part(b"abcdefgh"), b"abgh");
/// # Ok::<(), burn_megatron::mesh::ContextSplitError>(())
/// ```
#[derive(Debug)]
pub struct SequenceShard {
    shape: [usize; 2],
    /// The ends of the documents in the concatenated rows.
    ends: Vec<usize>,
    /// The tokens of each rank.
    tokens: Vec<Vec<usize>>,
    rank: usize,
    /// The places of the tokens before documents were padded or moved. `None` if no document was padded or moved.
    places: Option<TokenPlaces>,
    /// The real tokens. `None` if no token is padding.
    real: Option<Arc<RealTokens>>,
    uploads: Mutex<Uploads>,
}

/// The places (original indices) of the tokens of a batch, before its documents were padded or moved. Random numbers
/// are indexed by place. Padding and moving documents therefore do not change the random numbers of a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenPlaces {
    /// The index of each token in the original concatenated rows, or `None` for added padding.
    pub numbers: Vec<Option<usize>>,
    /// The length of the original rows, in tokens.
    pub row_length: usize,
    /// Whether the indices in `numbers` refer to all rows of the global batch instead of the rows of the micro-batch.
    pub in_global_batch: bool,
}

/// A part of the queries of a call. The first part and the last part each have about half of the query-key pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::nn) enum QueryPart {
    All,
    First,
    Last,
}

/// A cache of the tensors that layers have requested, on the device of the model.
#[derive(Debug, Default)]
struct Uploads {
    /// Position tensors, keyed by the range of rows for short sequences in the rotary table, if the table has separate
    /// rows for them.
    positions: HashMap<Option<Range<usize>>, Tensor<2, Int>>,
    /// Key ranges, keyed by queries, keys, the left side of the window, and the query part.
    ranges: HashMap<(Members, Members, Option<usize>, QueryPart), KeyRanges>,
    orders: HashMap<Members, Order>,
}

/// Compares the shards. Uploaded tensors are ignored.
impl PartialEq for SequenceShard {
    fn eq(&self, other: &Self) -> bool {
        let known = |of: &Self| (of.shape, of.rank);
        known(self) == known(other)
            && self.ends == other.ends
            && self.tokens == other.tokens
            && self.places == other.places
            && self.real == other.real
    }
}

impl Eq for SequenceShard {}

impl SequenceShard {
    /// Creates the shard of rank `rank` out of `ranks` ranks. `split` determines how each row is divided between the
    /// ranks. `documents` holds the starts of packed documents in the concatenated rows and the end of the last
    /// document, as in `Batch::documents`. If `documents` is not given, each row is one document.
    ///
    /// # Errors
    ///
    /// [`ContextSplitError`] if the rows or documents cannot be divided between the ranks.
    pub fn new(
        shape: [usize; 2],
        documents: Option<&[i32]>,
        split: ContextSplit,
        of: (usize, usize),
    ) -> Result<Arc<Self>, ContextSplitError> {
        Self::of_tokens(shape, documents, (None, None), split, of)
    }

    /// Creates a shard as [`new`](Self::new) does, for a batch with padding, or whose documents were padded or moved.
    ///
    /// # Errors
    ///
    /// [`ContextSplitError`] if the rows or documents cannot be divided between the ranks.
    pub fn of_tokens(
        [rows, seq]: [usize; 2],
        documents: Option<&[i32]>,
        (places, real): (Option<TokenPlaces>, Option<Arc<RealTokens>>),
        split: ContextSplit,
        (rank, ranks): (usize, usize),
    ) -> Result<Arc<Self>, ContextSplitError> {
        let ends: Vec<usize> = match documents {
            Some(starts) => starts.iter().skip(1).map(|end| *end as usize).collect(),
            None => (1..=rows).map(|row| row * seq).collect(),
        };
        let mut tokens = vec![Vec::with_capacity(rows * seq / ranks); ranks];
        let mut first = 0;
        for row in 0..rows {
            let past = first + ends[first..].partition_point(|end| *end <= (row + 1) * seq);
            let in_row: Vec<_> = ends[first..past]
                .iter()
                .map(|end| end - row * seq)
                .collect();
            for (rank, tokens) in tokens.iter_mut().enumerate() {
                let own = split.tokens(&in_row, rank, ranks)?;
                tokens.extend(own.into_iter().map(|token| row * seq + token));
            }
            first = past;
        }
        Ok(Arc::new(Self {
            shape: [rows, seq],
            ends,
            tokens,
            rank,
            places,
            real,
            uploads: Mutex::default(),
        }))
    }

    /// Returns the shape of the complete batch, `[batch, seq]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Returns the shape of this rank's part, `[batch, seq / context]`.
    pub fn local_shape(&self) -> [usize; 2] {
        let [rows, _] = self.shape;
        [rows, self.tokens().len() / rows.max(1)]
    }

    /// Returns the number of ranks that share the batch.
    pub fn ranks(&self) -> usize {
        self.tokens.len()
    }

    /// Returns this rank's index in the context group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns whether the places of tokens are indices into all rows of the global batch instead of the rows of the
    /// micro-batch.
    pub fn is_in_global_batch(&self) -> bool {
        let places = self.places.as_ref();
        places.is_some_and(|places| places.in_global_batch)
    }

    /// Returns the index of a token in the original concatenated rows, before documents were padded or moved. Returns
    /// `None` for added padding. Random numbers are indexed by this index.
    pub(in crate::nn) fn place(&self, token: usize) -> Option<usize> {
        let places = self.places.as_ref();
        places.map_or(Some(token), |places| places.numbers[token])
    }

    /// Returns the length of the original rows.
    pub(in crate::nn) fn row_of_places(&self) -> usize {
        let places = self.places.as_ref();
        places.map_or(self.shape[1], |places| places.row_length)
    }

    /// Returns this rank's tokens, as indices in the concatenated rows.
    pub fn tokens(&self) -> &[usize] {
        &self.tokens[self.rank]
    }

    /// Selects this rank's part of `values`, which are the row-major values `[batch, seq]` of the complete batch.
    pub fn part<T: Copy>(&self, values: &[T]) -> Vec<T> {
        self.tokens().iter().map(|token| values[*token]).collect()
    }

    /// Returns the number of query-key pairs for which this rank computes attention scores.
    pub fn pairs(&self, window: Option<Window>) -> u64 {
        let own = self.tokens().iter();
        own.map(|token| self.visible(*token, window).len() as u64)
            .sum()
    }

    /// Returns the position of each token in its document, for this part of each of this rank's rows.
    pub(in crate::nn) fn position_numbers(&self, part: Range<usize>) -> Vec<i32> {
        let [_, local] = self.local_shape();
        let rows = self.tokens().chunks(local.max(1));
        let own = rows.flat_map(|row| &row[part.clone()]);
        // Padding has no positions, and may be longer than the maximum sequence length.
        let position = |token| match self.is_padding(token) {
            true => 0,
            false => (token - self.document(token).start) as i32,
        };
        own.map(|token| position(*token)).collect()
    }

    /// Returns the rows of a rotary table for this rank's tokens. They depend on the length of the complete
    /// documents.
    pub(in crate::nn) fn positions(&self, table: &RopeTable, device: &Device) -> Positions {
        let [rows, local] = self.local_shape();
        let mut uploads = self.uploads.lock();
        let positions = uploads.positions.entry(table.short_rows());
        let positions = positions.or_insert_with_key(|short| {
            let mut numbers = self.position_numbers(0..local);
            if short.is_some() {
                let lengths = RealTokens::in_documents(self.real.as_deref(), &self.ends);
                for (number, token) in numbers.iter_mut().zip(self.tokens()) {
                    let length = lengths[self.document_number(*token)];
                    *number += table.first_row(length) as i32;
                }
            }
            Tensor::from_data(TensorData::new(numbers, [rows, local]), device)
        });
        Positions::Each(positions.clone())
    }

    /// Returns the tokens of some ranks in ascending order.
    pub(in crate::nn) fn of_members(&self, members: &Members) -> Vec<usize> {
        let mut tokens = self.tokens[members.clone()].concat();
        // The tokens of a single rank are already in order.
        if members.len() > 1 {
            tokens.sort_unstable();
        }
        tokens
    }

    /// Returns the ranges of `keys` that the tokens of `queries` attend to, both in ascending order. Queries outside
    /// `part` attend to nothing.
    pub(in crate::nn) fn ranges(
        &self,
        (queries, keys): (Members, Members),
        part: QueryPart,
        window: Option<Window>,
        device: &Device,
    ) -> KeyRanges {
        let mut uploads = self.uploads.lock();
        let key = (queries, keys, window.map(|window| window.left), part);
        let ranges = uploads.ranges.entry(key).or_insert_with_key(|key| {
            let (queries, keys) = (self.of_members(&key.0), self.of_members(&key.1));
            let among = |seen: Range<usize>| {
                let place = |token| keys.partition_point(|key| *key < token);
                place(seen.start)..place(seen.end)
            };
            let ranges = queries
                .iter()
                .map(|query| among(self.visible(*query, window)));
            let mut ranges: Vec<_> = ranges.collect();
            keep_part(&mut ranges, part);
            match KeyRanges::new(ranges, keys.len(), device) {
                Ok(ranges) => ranges,
                Err(error) => panic!("{error}"),
            }
        });
        ranges.clone()
    }

    /// Returns the ranges of all ranks' tokens that this rank's tokens attend to.
    pub(in crate::nn) fn ranges_in_batch(
        &self,
        window: Option<Window>,
        device: &Device,
    ) -> KeyRanges {
        let members = (self.rank..self.rank + 1, 0..self.ranks());
        self.ranges(members, QueryPart::All, window, device)
    }

    /// Returns the order that makes the tokens of `members` ascending.
    pub(in crate::nn) fn order(&self, members: Members, device: &Device) -> Order {
        let mut uploads = self.uploads.lock();
        let order = uploads.orders.entry(members);
        let order = order.or_insert_with_key(|members| {
            Order::new(&self.tokens[members.clone()].concat(), device)
        });
        order.clone()
    }

    /// Gathers `[tokens, ..]` of all ranks in ascending order. The operation is differentiable. `comm` are the ranks,
    /// or one rank of each group of neighbours that hold the same tokens.
    pub(in crate::nn) fn gathered(&self, own: Tensor<3>, comm: &Comm) -> Tensor<3> {
        let order = self.order(0..self.ranks(), &own.device());
        order.ascending(collective::gather_sequence(own, 0, comm))
    }

    /// Returns the tokens that a token attends to. Padding attends to no token, so it does not affect attention
    /// statistics.
    pub(in crate::nn) fn visible(&self, token: usize, window: Option<Window>) -> Range<usize> {
        let first = self.document(token).start;
        let first = match window {
            Some(window) => first.max(token.saturating_sub(window.left)),
            None => first,
        };
        if self.is_padding(token) {
            return token + 1..token + 1;
        }
        first..token + 1
    }

    fn is_padding(&self, token: usize) -> bool {
        let real = self.real.as_ref();
        real.is_some_and(|real| !real.is_real()[token])
    }

    /// Returns the tokens of the document of a token.
    pub(in crate::nn) fn document(&self, token: usize) -> Range<usize> {
        let number = self.document_number(token);
        let start = number.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[number]
    }

    fn document_number(&self, token: usize) -> usize {
        self.ends.partition_point(|end| *end <= token)
    }
}

/// Empties the key ranges of the queries outside `part`. The starts and the ends of the ranges must not decrease.
fn keep_part(ranges: &mut [Range<usize>], part: QueryPart) {
    let pairs: usize = ranges.iter().map(Range::len).sum();
    let mut before = 0;
    let split = ranges.iter().position(|range| {
        before += range.len();
        2 * before >= pairs
    });
    let (first, last) = ranges.split_at_mut(split.map_or(0, |at| at + 1));
    match part {
        QueryPart::All => {}
        QueryPart::First => {
            let end = first.last().map_or(0, |range| range.end);
            last.iter_mut().for_each(|range| *range = end..end);
        }
        QueryPart::Last => first.iter_mut().for_each(|range| *range = 0..0),
    }
}
