//! Which tokens attend to each other, and at which positions they are.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_megatron_kernels::KernelError;
use burn_megatron_kernels::attention::{KeyRanges, Window};
use burn_megatron_kernels::embedding::SortedLookups;
use burn_megatron_kernels::rope::{Positions, RopeTable};
use burn_megatron_kernels::softmax::Mask;
use parking_lot::Mutex;

use super::context::SequenceShard;
use super::moe::{RoutedTokens, TokenPositions};
use super::{KvCache, LayerKvCache, RealTokens, Tokens};

/// The format of a batch.
#[derive(Debug)]
pub enum BatchFormat<'a> {
    /// Each row is one sequence, from position 0 on.
    Rows,
    /// Rows of packed documents.
    Packed(Box<PackedSequences>),
    /// A part of each row, on one rank of a context group.
    Sharded(Arc<SequenceShard>),
    /// New tokens of sequences in the cache, in one row: those that it [reads](KvCache::read).
    Cached(&'a mut KvCache),
}

impl BatchFormat<'_> {
    /// The context of the attention layer `index` of this rank.
    ///
    /// # Panics
    ///
    /// If the cache has no such layer.
    pub fn layer(&mut self, index: usize) -> AttentionContext<'_> {
        match self {
            Self::Rows => AttentionContext::Rows,
            Self::Packed(packed) => AttentionContext::Packed(packed),
            Self::Sharded(shard) => AttentionContext::Sharded(shard),
            Self::Cached(cache) => AttentionContext::Cached(cache.layer(index)),
        }
    }

    /// Returns the padding and the positions of `tokens`, which have this format. Routers of experts read them: see
    /// [`MoeMlp::forward_with`](super::moe::MoeMlp::forward_with).
    pub fn routed(&self, tokens: &Tokens) -> RoutedTokens {
        let positions = match self {
            Self::Rows => TokenPositions::InRows,
            Self::Packed(packed) => TokenPositions::Each(packed.position_numbers.clone()),
            Self::Sharded(shard) => TokenPositions::Sharded(shard.clone()),
            Self::Cached(cache) => return cache.routed(),
        };
        RoutedTokens::new(tokens.ids.dims(), positions, tokens.real.clone())
    }
}

/// The tokens to which the tokens of one attention layer attend, always causally.
#[derive(Debug)]
pub enum AttentionContext<'a> {
    /// Earlier tokens of their row.
    Rows,
    /// Earlier tokens of their document.
    Packed(&'a PackedSequences),
    /// Earlier tokens of their document, on all ranks of the context group.
    Sharded(&'a Arc<SequenceShard>),
    /// Of their sequence the tokens in the cache and earlier new ones, which are appended to the cache. For
    /// generation: no dropout, no backward.
    Cached(LayerKvCache<'a>),
}

/// An [`AttentionContext`] without a cache, for the body of a [recomputed](super::recompute) region, which owns it.
/// Clones share their tensors.
#[derive(Clone, Debug)]
pub enum OwnedAttentionContext {
    /// [`AttentionContext::Rows`].
    Rows,
    /// [`AttentionContext::Packed`].
    Packed(Box<PackedSequences>),
    /// [`AttentionContext::Sharded`].
    Sharded(Arc<SequenceShard>),
}

impl OwnedAttentionContext {
    /// The same, borrowed.
    pub fn context(&self) -> AttentionContext<'_> {
        match self {
            Self::Rows => AttentionContext::Rows,
            Self::Packed(packed) => AttentionContext::Packed(packed),
            Self::Sharded(shard) => AttentionContext::Sharded(shard),
        }
    }
}

impl AttentionContext<'_> {
    /// The same, owned; none with a cache, which has no backward.
    pub fn to_owned_context(&self) -> Option<OwnedAttentionContext> {
        match self {
            Self::Rows => Some(OwnedAttentionContext::Rows),
            Self::Packed(packed) => {
                Some(OwnedAttentionContext::Packed(Box::new((*packed).clone())))
            }
            Self::Sharded(shard) => Some(OwnedAttentionContext::Sharded((*shard).clone())),
            Self::Cached(_) => None,
        }
    }

    /// Returns the rows of `table` for the tokens, `seq` of each row of the batch.
    ///
    /// The length of a sequence chooses its rows ([`RopeTable::first_row`]). A sequence is a row of the batch, a document
    /// without its padding, or the text so far.
    ///
    /// # Panics
    ///
    /// With a cache: if a text has grown to other rows without [`KvCache::begin`].
    pub(super) fn positions(&self, table: &RopeTable, seq: usize, device: &Device) -> Positions {
        match self {
            Self::Rows => Positions::From(table.first_row(seq)),
            Self::Packed(packed) => Positions::Each(packed.rows_of(table)),
            Self::Sharded(shard) => shard.positions(table, device),
            Self::Cached(layer) => layer.positions(table, device),
        }
    }
}

/// Packed documents in the rows of a batch `[batch, seq]`. Attention does not cross documents, and each
/// starts at position 0.
#[derive(Clone, Debug)]
pub struct PackedSequences {
    shape: [usize; 2],
    /// The documents in the concatenated rows.
    documents: KeyRanges,
    /// `[batch, seq]`: the position of each token in its document.
    positions: Tensor<2, Int>,
    /// The same on the host.
    position_numbers: Arc<[i32]>,
    /// The ends of the documents in the concatenated rows.
    ends: Arc<[usize]>,
    /// None if no token is padding.
    real: Option<Arc<RealTokens>>,
    /// The rows of tables in which short sequences have other rows, by these rows.
    rows: Arc<Mutex<HashMap<Range<usize>, Tensor<2, Int>>>>,
    /// `[batch, 1, seq, 1]`: true for padding. None if no token is.
    padding: Option<Tensor<4, Bool>>,
}

/// Invalid document boundaries.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PackedSequencesError {
    /// They do not cover the batch.
    #[error(
        "invalid document boundaries {bounds:?} for {rows} rows of {seq} tokens: expected boundaries from \
         0 to {}",
        rows * seq
    )]
    Bounds {
        /// The first and the last boundary; empty if there is none.
        bounds: Vec<i32>,
        /// Rows of the batch.
        rows: usize,
        /// Tokens of a row.
        seq: usize,
    },
    /// A document ends before it begins.
    #[error("invalid document from {begin} to {end}: expected increasing boundaries")]
    Order {
        /// Where it begins.
        begin: i32,
        /// Where it ends.
        end: i32,
    },
    /// A document is in two rows.
    #[error("invalid document from {begin} to {end}: it crosses the end of a row of {seq} tokens")]
    Row {
        /// Where it begins.
        begin: i32,
        /// Where it ends.
        end: i32,
        /// Tokens of a row.
        seq: usize,
    },
    /// More tokens than the attention kernels support.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl PackedSequences {
    /// The documents of a batch `[batch, seq]`. `starts` are their offsets in the concatenated rows,
    /// followed by the end of the last one: `0, ..., batch * seq`.
    ///
    /// # Errors
    ///
    /// [`PackedSequencesError`] if they do not cover the rows, or one crosses the end of a row.
    pub fn new(
        starts: &[i32],
        shape: [usize; 2],
        device: &Device,
    ) -> Result<Self, PackedSequencesError> {
        Self::with_padding(starts, None, shape, device)
    }

    /// The same of tokens of which some are padding, which attends to nothing, so that it counts in no statistic of
    /// attention.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn with_padding(
        starts: &[i32],
        real: Option<Arc<RealTokens>>,
        shape: [usize; 2],
        device: &Device,
    ) -> Result<Self, PackedSequencesError> {
        let [rows, seq] = shape;
        let bounds = [starts.first(), starts.last()].into_iter().flatten();
        let bounds: Vec<i32> = bounds.copied().collect();
        if bounds.first() != Some(&0) || bounds[1] as usize != rows * seq {
            return Err(PackedSequencesError::Bounds { bounds, rows, seq });
        }
        let mut positions = Vec::with_capacity(rows * seq);
        for pair in starts.windows(2) {
            let (begin, end) = (pair[0], pair[1]);
            if end < begin {
                return Err(PackedSequencesError::Order { begin, end });
            }
            if end > begin && begin as usize / seq != (end as usize - 1) / seq {
                return Err(PackedSequencesError::Row { begin, end, seq });
            }
            positions.extend(0..end - begin);
        }
        let ends: Vec<_> = starts[1..].iter().map(|end| *end as usize).collect();
        Ok(Self {
            shape,
            documents: match &real {
                None => KeyRanges::of_documents(&ends, device)?,
                Some(real) => KeyRanges::new(ranges_of_real(&ends, real), rows * seq, device)?,
            },
            padding: real.as_ref().map(|real| {
                let padding = real.is_real().iter().map(|real| !real).collect();
                let padding = TensorData::new(padding, [rows, 1, seq, 1]);
                Tensor::from_data(padding, &device.clone().inner())
            }),
            positions: Tensor::from_data(TensorData::new(positions.clone(), shape), device),
            position_numbers: positions.into(),
            ends: ends.into(),
            real,
            rows: Arc::default(),
        })
    }

    /// Returns the row of a table for each token.
    fn rows_of(&self, table: &RopeTable) -> Tensor<2, Int> {
        let Some(short) = table.short_rows() else {
            return self.positions.clone();
        };
        let mut known = self.rows.lock();
        let rows = known.entry(short).or_insert_with(|| {
            let lengths = RealTokens::in_documents(self.real.as_deref(), &self.ends);
            let starts = std::iter::once(0).chain(self.ends.iter().copied());
            let documents = starts.zip(&*self.ends).zip(lengths);
            let rows = documents.flat_map(|((start, end), length)| {
                let first = table.first_row(length) as i32;
                let positions = &self.position_numbers[start..*end];
                positions.iter().map(move |position| first + position)
            });
            let rows = TensorData::new(rows.collect::<Vec<_>>(), self.shape);
            Tensor::from_data(rows, &self.positions.device())
        });
        rows.clone()
    }

    /// `[batch, seq]`: the position of each token in its document.
    pub fn positions(&self) -> &Tensor<2, Int> {
        &self.positions
    }

    /// The lookups of the positions of this part of each row, sorted.
    pub(super) fn sorted_positions(&self, part: Range<usize>) -> SortedLookups {
        let rows = self.position_numbers.chunks(self.shape[1].max(1));
        let numbers: Vec<i32> = rows
            .flat_map(|row| row[part.clone()].iter().copied())
            .collect();
        SortedLookups::new(&numbers)
    }

    /// The documents in the concatenated rows, `batch * seq` tokens.
    pub(super) fn documents(&self) -> &KeyRanges {
        &self.documents
    }

    /// The attention mask: hides other documents, later tokens, and tokens outside of the window.
    pub(super) fn mask(&self, window: Option<Window>) -> Mask {
        let [rows, seq] = self.shape;
        let positions = self.positions.clone().inner();
        let count = Tensor::<1, Int>::arange(0..seq as i64, &positions.device());
        let count = count.cast(positions.dtype());
        let query = count.clone().reshape([1, 1, seq, 1]);
        let key = count.reshape([1, 1, 1, seq]).expand([rows, 1, seq, seq]);
        let earlier = positions.reshape([rows, 1, seq, 1]);
        let visible = match window {
            Some(window) => earlier.clamp_max(window.left as i64),
            None => earlier,
        };
        let query = query.expand([rows, 1, seq, 1]);
        let first = (query.clone() - visible).expand([rows, 1, seq, seq]);
        let later = key.clone().greater(query.expand([rows, 1, seq, seq]));
        let hidden = key.lower(first).bool_or(later);
        Mask::Hidden(match &self.padding {
            None => hidden,
            Some(padding) => hidden.bool_or(padding.clone().expand([rows, 1, seq, seq])),
        })
    }
}

/// Returns the documents of real tokens, given the ends of all documents. Documents of padding are empty.
fn ranges_of_real(ends: &[usize], real: &RealTokens) -> Vec<Range<usize>> {
    let mut start = 0;
    let of_document = |&end: &usize| {
        let first = std::mem::replace(&mut start, end);
        (first..end).map(move |token| match real.is_real()[token] {
            true => first..end,
            false => end..end,
        })
    };
    ends.iter().flat_map(of_document).collect()
}
