//! What the tokens of a forward see, and where they stand.

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_megatron_kernels::KernelError;
use burn_megatron_kernels::attention::Documents;
use burn_megatron_kernels::rope::Positions;
use burn_megatron_kernels::softmax::Mask;

use super::{CachedLayer, KvCache};

/// How a model reads a batch.
#[derive(Debug)]
pub enum Reading<'a> {
    /// Each row is one piece, from position 0 on.
    Rows,
    /// Several documents stand in a row.
    Documents(Box<Packed>),
    /// Each row goes on where the sequence in the cache ends.
    After(&'a mut KvCache),
}

impl Reading<'_> {
    /// What a layer sees; `index` is its number among those of this rank.
    ///
    /// # Panics
    ///
    /// With a cache that has no such layer.
    pub fn layer(&mut self, index: usize) -> Sight<'_> {
        match self {
            Self::Rows => Sight::Rows,
            Self::Documents(packed) => Sight::Documents(packed),
            Self::After(cache) => Sight::After(cache.layer(index)),
        }
    }
}

/// What the tokens of one attention see; none sees what comes after it.
#[derive(Debug)]
pub enum Sight<'a> {
    /// Those before them in their row.
    Rows,
    /// Those before them in their document.
    Documents(&'a Packed),
    /// Those before them in their row, and before these all that are in the cache, which gets the row
    /// too. For generation: nothing is dropped or recorded for a backward.
    After(CachedLayer<'a>),
}

impl Sight<'_> {
    /// Where the tokens stand.
    pub(super) fn positions(&self) -> Positions {
        match self {
            Self::Rows => Positions::From(0),
            Self::Documents(packed) => Positions::Each(packed.positions.clone()),
            Self::After(layer) => Positions::From(layer.first()),
        }
    }
}

/// Documents in the rows of a batch `[batch, seq]`. None sees another, and each begins at position 0.
#[derive(Clone, Debug)]
pub struct Packed {
    shape: [usize; 2],
    /// Where they end in the rows laid end to end.
    bounds: Documents,
    /// `[batch, seq]`: where each token stands in its document.
    positions: Tensor<2, Int>,
}

/// Documents that do not fit the rows that they stand in.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PackedError {
    /// They do not go from the beginning to the end.
    #[error(
        "documents with the borders {borders:?} do not fill {rows} rows of {seq} tokens; borders from \
         0 to {} would",
        rows * seq
    )]
    Ends {
        /// The first and the last border; nothing where there is none.
        borders: Vec<i32>,
        /// Rows of the batch.
        rows: usize,
        /// Tokens of a row.
        seq: usize,
    },
    /// One ends before it begins.
    #[error("a document from {begin} to {end} cannot be; documents follow each other")]
    Order {
        /// Where it begins.
        begin: i32,
        /// Where it ends.
        end: i32,
    },
    /// One is in two rows.
    #[error("a document from {begin} to {end} goes over the end of a row of {seq} tokens")]
    Row {
        /// Where it begins.
        begin: i32,
        /// Where it ends.
        end: i32,
        /// Tokens of a row.
        seq: usize,
    },
    /// More tokens than attention counts.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

impl Packed {
    /// The documents of a batch `[batch, seq]`, which begin at `starts` in the rows laid end to end; the
    /// last number says where the last one ends: `0, ..., batch * seq`.
    ///
    /// # Errors
    ///
    /// [`PackedError`] when they do not fill the rows, or one goes over the end of a row.
    pub fn new(starts: &[i32], shape: [usize; 2], device: &Device) -> Result<Self, PackedError> {
        let [rows, seq] = shape;
        let borders = [starts.first(), starts.last()].into_iter().flatten();
        let borders: Vec<i32> = borders.copied().collect();
        if borders.first() != Some(&0) || borders[1] as usize != rows * seq {
            return Err(PackedError::Ends { borders, rows, seq });
        }
        let mut positions = Vec::with_capacity(rows * seq);
        for pair in starts.windows(2) {
            let (begin, end) = (pair[0], pair[1]);
            if end < begin {
                return Err(PackedError::Order { begin, end });
            }
            if end > begin && begin as usize / seq != (end as usize - 1) / seq {
                return Err(PackedError::Row { begin, end, seq });
            }
            positions.extend(0..end - begin);
        }
        let ends = starts[1..].iter().map(|end| *end as usize).collect();
        Ok(Self {
            shape,
            bounds: Documents::new(ends, device)?,
            positions: Tensor::from_data(TensorData::new(positions, shape), device),
        })
    }

    /// `[batch, seq]`: where each token stands in its document.
    pub fn positions(&self) -> &Tensor<2, Int> {
        &self.positions
    }

    /// The documents of one row of `batch * seq` tokens.
    pub(super) fn bounds(&self) -> &Documents {
        &self.bounds
    }

    /// What is out of sight: another document, what comes later, and what is not in the window.
    pub(super) fn mask(&self, window: Option<usize>) -> Mask {
        let [rows, seq] = self.shape;
        let positions = self.positions.clone().inner();
        let count = Tensor::<1, Int>::arange(0..seq as i64, &positions.device());
        let count = count.cast(positions.dtype());
        let query = count.clone().reshape([1, 1, seq, 1]);
        let key = count.reshape([1, 1, 1, seq]).expand([rows, 1, seq, seq]);
        let before = positions.reshape([rows, 1, seq, 1]);
        let before = match window {
            Some(tokens) => before.clamp_max(tokens as i64 - 1),
            None => before,
        };
        let query = query.expand([rows, 1, seq, 1]);
        let first = (query.clone() - before).expand([rows, 1, seq, seq]);
        let later = key.clone().greater(query.expand([rows, 1, seq, seq]));
        Mask::Hidden(key.lower(first).bool_or(later))
    }
}
