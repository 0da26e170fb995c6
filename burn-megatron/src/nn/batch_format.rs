//! Batch formats. The format determines which tokens attend to each other, and the position of each token.

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

/// The format of a batch. It determines the position of each token, and the tokens that each token attends to.
#[derive(Debug)]
pub enum BatchFormat<'a> {
    /// Each row is one sequence that starts at position 0.
    Rows,
    /// Each row contains one or more packed documents.
    Packed(Box<PackedSequences>),
    /// This rank holds a part of each row, and the other ranks of its context group hold the other parts.
    Sharded(Arc<SequenceShard>),
    /// The batch contains new tokens of sequences in a KV cache, concatenated into one row. [`KvCache::read`] sets the
    /// number of new tokens per sequence.
    Cached(&'a mut KvCache),
}

impl BatchFormat<'_> {
    /// Returns the attention context of an attention layer. `index` is the index of the layer among the attention
    /// layers of this rank.
    ///
    /// # Panics
    ///
    /// If the KV cache has no layer with this index.
    pub fn layer(&mut self, index: usize) -> AttentionContext<'_> {
        match self {
            Self::Rows => AttentionContext::Rows,
            Self::Packed(packed) => AttentionContext::Packed(packed),
            Self::Sharded(shard) => AttentionContext::Sharded(shard),
            Self::Cached(cache) => AttentionContext::Cached(cache.layer(index)),
        }
    }

    /// Returns the padding mask and the positions of `tokens`, which MoE routers need. See
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

/// The context of an attention layer: the tokens that each token attends to. Attention is always causal.
#[derive(Debug)]
pub enum AttentionContext<'a> {
    /// Each token attends to earlier tokens of the same row.
    Rows,
    /// Each token attends to earlier tokens of the same document.
    Packed(&'a PackedSequences),
    /// Each token attends to earlier tokens of the same document, on all ranks of the context group.
    Sharded(&'a Arc<SequenceShard>),
    /// Each new token attends to cached tokens and to earlier new tokens of the same sequence. The new tokens are
    /// appended to the cache. This context is for generation and supports neither dropout nor a backward pass.
    Cached(LayerKvCache<'a>),
}

/// An owned [`AttentionContext`] without a KV cache, which a [recomputed](super::recompute) region can store. Clones
/// share their tensors.
#[derive(Clone, Debug)]
pub enum OwnedAttentionContext {
    /// The owned form of [`AttentionContext::Rows`].
    Rows,
    /// The owned form of [`AttentionContext::Packed`].
    Packed(Box<PackedSequences>),
    /// The owned form of [`AttentionContext::Sharded`].
    Sharded(Arc<SequenceShard>),
}

impl OwnedAttentionContext {
    /// Returns the borrowed context.
    pub fn context(&self) -> AttentionContext<'_> {
        match self {
            Self::Rows => AttentionContext::Rows,
            Self::Packed(packed) => AttentionContext::Packed(packed),
            Self::Sharded(shard) => AttentionContext::Sharded(shard),
        }
    }
}

impl AttentionContext<'_> {
    /// Returns the owned context. Returns `None` for a KV cache, which does not support a backward pass.
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

    /// Returns the row of the rotary table `table` for each token. `seq` is the number of tokens in each row of the
    /// batch.
    ///
    /// The rows of the table depend on the length of the sequence ([`RopeTable::first_row`]). A sequence is a row of
    /// the batch, a document without its padding, or the text generated so far.
    ///
    /// # Panics
    ///
    /// With a KV cache: if the new length of a text requires other rows of the table and [`KvCache::begin`] was not
    /// called.
    pub(super) fn positions(&self, table: &RopeTable, seq: usize, device: &Device) -> Positions {
        match self {
            Self::Rows => Positions::From(table.first_row(seq)),
            Self::Packed(packed) => Positions::Each(packed.rows_of(table)),
            Self::Sharded(shard) => shard.positions(table, device),
            Self::Cached(layer) => layer.positions(table, device),
        }
    }
}

/// The boundaries of documents that are packed into the rows of a batch `[batch, seq]`. Tokens attend only to tokens of
/// the same document. The positions of each document start at 0.
///
/// ```
/// use burn::tensor::Device;
/// use burn_megatron::nn::PackedSequences;
///
/// // One row with documents of 3, 2 and 3 tokens.
/// let packed = PackedSequences::new(&[0, 3, 5, 8], [1, 8], &Device::flex())?;
/// let positions = packed.positions().clone().into_data().convert::<i64>();
/// assert_eq!(positions.try_into_vec::<i64>().unwrap(), [0, 1, 2, 0, 1, 0, 1, 2]);
/// // In two rows of 4 tokens, the second document would cross the end of a row.
/// assert!(PackedSequences::new(&[0, 3, 5, 8], [2, 4], &Device::flex()).is_err());
/// # Ok::<(), burn_megatron::nn::PackedSequencesError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PackedSequences {
    shape: [usize; 2],
    /// The documents in the concatenated rows.
    documents: KeyRanges,
    /// `[batch, seq]`: the position of each token in its document.
    positions: Tensor<2, Int>,
    /// The values of `positions`, on the host.
    position_numbers: Arc<[i32]>,
    /// The ends of the documents in the concatenated rows.
    ends: Arc<[usize]>,
    /// The tokens that are not padding. `None` if there is no padding.
    real: Option<Arc<RealTokens>>,
    /// The rows of rotary tables that have separate rows for short sequences, keyed by the range of the separate rows.
    rows: Arc<Mutex<HashMap<Range<usize>, Tensor<2, Int>>>>,
    /// `[batch, 1, seq, 1]`: true for padding. `None` if there is no padding.
    padding: Option<Tensor<4, Bool>>,
}

/// The error for invalid boundaries of packed documents.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PackedSequencesError {
    /// The boundaries do not start at 0, or do not end at the last token of the batch.
    #[error(
        "invalid document boundaries {bounds:?} for {rows} rows of {seq} tokens: expected boundaries from \
         0 to {}",
        rows * seq
    )]
    Bounds {
        /// The first and the last boundary. Empty if there are no boundaries.
        bounds: Vec<i32>,
        /// The number of rows of the batch.
        rows: usize,
        /// The number of tokens per row.
        seq: usize,
    },
    /// A document ends before it begins.
    #[error("invalid document from {begin} to {end}: expected increasing boundaries")]
    Order {
        /// The index of the first token of the document.
        begin: i32,
        /// The index after the last token of the document.
        end: i32,
    },
    /// A document crosses the end of a row.
    #[error("invalid document from {begin} to {end}: it crosses the end of a row of {seq} tokens")]
    Row {
        /// The index of the first token of the document.
        begin: i32,
        /// The index after the last token of the document.
        end: i32,
        /// The number of tokens per row.
        seq: usize,
    },
    /// The batch has more tokens than the attention kernels support.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl PackedSequences {
    /// Creates the description of the documents of a batch `[batch, seq]`. `starts` holds the offsets of the documents
    /// in the concatenated rows, followed by the end of the last document: `0, ..., batch * seq`.
    ///
    /// # Errors
    ///
    /// [`PackedSequencesError`] if the documents do not cover the rows, or if a document crosses the end of a row.
    pub fn new(
        starts: &[i32],
        shape: [usize; 2],
        device: &Device,
    ) -> Result<Self, PackedSequencesError> {
        Self::with_padding(starts, None, shape, device)
    }

    /// Creates the description of documents in which some tokens are padding. `real` marks the tokens that are not
    /// padding. Padding tokens attend to no token, so they do not affect attention statistics. See [`new`](Self::new)
    /// for the other arguments.
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

    /// Returns the row of a rotary table for each token.
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

    /// Returns the position of each token in its document: `[batch, seq]`.
    pub fn positions(&self) -> &Tensor<2, Int> {
        &self.positions
    }

    /// Returns the positions in `part` of each row as sorted embedding lookups.
    pub(super) fn sorted_positions(&self, part: Range<usize>) -> SortedLookups {
        let rows = self.position_numbers.chunks(self.shape[1].max(1));
        let numbers: Vec<i32> = rows
            .flat_map(|row| row[part.clone()].iter().copied())
            .collect();
        SortedLookups::new(&numbers)
    }

    /// Returns the documents in the concatenated rows of `batch * seq` tokens.
    pub(super) fn documents(&self) -> &KeyRanges {
        &self.documents
    }

    /// Returns the attention mask. It hides other documents, later tokens, and tokens outside the window.
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

/// Returns the token range of the document of each real token, given the ends of all documents. The range of a padding
/// token is empty.
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
