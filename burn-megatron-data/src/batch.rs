//! Batches of samples. Each row of a batch is one sample.

use std::ops::{Add, Range};
use std::sync::Arc;

use burn_megatron_kernels::embedding::SortedLookups;

use super::{DataError, FurtherTokens, IGNORE, Sample};
use burn_megatron::mesh::ContextSplit;
use burn_megatron::nn::RealTokens;
use burn_megatron::nn::context::{SequenceShard, TokenPlaces};

/// A batch of samples of equal length. The tokens and the targets are matrices `[rows, seq]`, and each row is one
/// sample.
///
/// ```
/// use burn_megatron::mesh::ContextSplit;
/// use burn_megatron_data::{Batch, Sample};
///
/// let row = |first: i32| Sample {
///     tokens: (first..first + 4).collect(),
///     targets: (first + 1..first + 5).collect(),
///     ..Sample::default()
/// };
/// let batch = Batch::new([row(0), row(10)])?;
/// assert_eq!((batch.rows, batch.seq, batch.counted()), (2, 4, 8));
/// // The part of rank 0 of 2 context ranks.
/// let part = batch.in_context(ContextSplit::Zigzag, (0, 2), 1)?;
/// assert_eq!(part.tokens(), [0, 3, 10, 13]);
/// # Ok::<(), burn_megatron_data::DataError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    tokens: Vec<i32>,
    /// The target tokens: `[rows, seq]`, row-major.
    pub targets: Vec<i32>,
    /// The number of rows, which is the number of samples.
    pub rows: usize,
    /// The number of tokens in a row.
    pub seq: usize,
    /// The starts of the documents in the concatenated rows, followed by the end of the last document:
    /// `0, ..., rows * seq` (as `cu_seqlens` in FlashAttention). A token only attends to tokens of the same document.
    /// `None` if every row is one document.
    pub documents: Option<Vec<i32>>,
    /// If the rows are split over the ranks of a context group, the tokens of each row that are on this rank. `seq` is
    /// then the number of these tokens, and `documents` is `None`.
    pub shard: Option<Arc<SequenceShard>>,
    /// The number of padding tokens that were added to complete rows so that each document can be split.
    padding: u64,
    /// The tokens that are not padding; `None` if all tokens are real.
    real: Option<Arc<RealTokens>>,
    /// The number of targets in the complete rows that are not ignored, if the rows are shared.
    counted_of_rows: Option<u64>,
    /// Sorted when the batch is made, in the thread that reads ahead.
    sorted: Arc<SortedLookups>,
    /// The inputs and targets of multi-token prediction, by depth from 1.
    further: Vec<FurtherTokens>,
}

/// The number of padding tokens that were added to documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Padding {
    /// The number of padding tokens.
    pub added: u64,
    /// The total number of tokens, including padding.
    pub all: u64,
}

impl Add for Padding {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            added: self.added + other.added,
            all: self.all + other.all,
        }
    }
}

impl Batch {
    /// Creates a batch from samples, in the given order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] if there is no sample; [`DataError::UnequalRows`] if the lengths of the samples differ.
    pub fn new(samples: impl IntoIterator<Item = Sample>) -> Result<Self, DataError> {
        let mut samples = samples.into_iter().peekable();
        let seq = samples.peek().ok_or(DataError::NoRows)?.tokens.len();
        let mut batch = Self {
            tokens: Vec::new(),
            targets: Vec::new(),
            rows: 0,
            seq,
            documents: None,
            shard: None,
            padding: 0,
            real: None,
            counted_of_rows: None,
            sorted: Arc::default(),
            further: vec![],
        };
        let (mut documents, mut is_real) = (vec![], vec![]);
        for sample in samples {
            // The fields are public, so the lengths of a sample may differ.
            for length in [sample.tokens.len(), sample.targets.len()] {
                if length != seq {
                    let row = batch.rows;
                    return Err(DataError::UnequalRows { row, length, seq });
                }
            }
            let first = batch.rows * seq;
            is_real.resize(first + seq.saturating_sub(sample.padding), true);
            is_real.resize(first + seq, false);
            if sample.documents.is_empty() {
                documents.push(first as i32)
            } else {
                documents.extend(sample.documents.iter().map(|at| (first + at) as i32));
                batch.documents = Some(vec![]);
            }
            // The padding is a separate document.
            let end = (first + seq.saturating_sub(sample.padding)) as i32;
            if sample.padding > 0 && documents.last().is_some_and(|last| *last < end) {
                documents.push(end);
                batch.documents = Some(vec![]);
            }
            batch.tokens.extend(sample.tokens);
            batch.targets.extend(sample.targets);
            batch.rows += 1;
        }
        if batch.documents.is_some() {
            documents.push((batch.rows * seq) as i32);
            batch.documents = Some(documents);
        }
        batch.sorted = Arc::new(SortedLookups::new(&batch.tokens));
        batch.real = RealTokens::new(is_real, batch.rows);
        Ok(batch)
    }

    /// Cuts the rows of the batch into shorter rows of `length` tokens. `length` must divide the length of a complete
    /// row. A document that is cut becomes several documents, so positions restart in each new row. A batch that is
    /// already split over ranks is returned unchanged.
    pub fn in_rows_of(self, length: usize) -> Self {
        if self.shard.is_some() || self.seq <= length {
            return self;
        }
        let rows = self.rows * self.seq / length;
        let documents = self.documents.map(|starts| {
            let borders = (0..=rows).map(|row| (row * length) as i32);
            let mut starts: Vec<_> = starts.into_iter().chain(borders).collect();
            starts.sort_unstable();
            starts.dedup();
            starts
        });
        let real = self
            .real
            .and_then(|real| RealTokens::new(real.is_real().to_vec(), rows));
        Self {
            rows,
            seq: length,
            documents,
            real,
            further: vec![],
            ..self
        }
    }

    /// Adds the inputs and targets of multi-token prediction for the depths 1 to `depths`. Call this method on complete
    /// rows, before they are split over ranks. A batch that is already split is returned unchanged.
    pub fn with_further_tokens(mut self, depths: usize) -> Self {
        if self.shard.is_none() && self.further.len() != depths {
            let of_depth = |depth| FurtherTokens::new(&self, depth);
            self.further = (1..=depths).map(of_depth).collect();
        }
        self
    }

    /// Returns the ends of the documents in the concatenated rows.
    pub(super) fn document_ends(&self) -> Vec<usize> {
        match &self.documents {
            Some(starts) => starts[1..].iter().map(|end| *end as usize).collect(),
            None => (1..=self.rows).map(|row| row * self.seq).collect(),
        }
    }

    /// Splits a batch of complete rows over the `ranks` ranks of a context group, and returns the part of rank `rank`.
    /// Targets are already shifted before the split, so each target stays with its token.
    /// [`ContextSplit::ZigzagPerDocument`] pads each document to a length that can be divided over the ranks, and then
    /// pads all rows to the length of the longest row. Targets of the padding are ignored.
    ///
    /// # Errors
    ///
    /// [`DataError::Context`] if rows cannot be split over the context ranks, or if a part cannot be split over
    /// `tensor` tensor ranks.
    pub fn in_context(
        mut self,
        split: ContextSplit,
        (rank, ranks): (usize, usize),
        tensor: usize,
    ) -> Result<Self, DataError> {
        if self.shard.is_some() || ranks == 1 {
            return Ok(self);
        }
        let (of, mut moved) = ((rank, ranks), None);
        if split == ContextSplit::ZigzagPerDocument {
            let depths = self.further.len();
            let places;
            (self, places) = self.padded(split.divisor(ranks, 1), split.divisor(ranks, tensor));
            self = self.with_further_tokens(depths);
            moved = Some(places);
        }
        split.check(self.seq, ranks, tensor)?;
        let shape = [self.rows, self.seq];
        let documents = self.documents.as_deref();
        let tokens = (moved, self.real.clone());
        let shard = SequenceShard::of_tokens(shape, documents, tokens, split, of)?;
        Ok(self.part_of(shard))
    }

    fn part_of(&self, shard: Arc<SequenceShard>) -> Self {
        let tokens = shard.part(&self.tokens);
        let [_, seq] = shard.local_shape();
        Self {
            targets: shard.part(&self.targets),
            sorted: Arc::new(SortedLookups::new(&tokens)),
            tokens,
            rows: self.rows,
            seq,
            documents: None,
            further: self.further.iter().map(|of| of.part(&shard)).collect(),
            real: self.real.as_ref().map(|real| real.part(&shard)),
            shard: Some(shard),
            padding: self.padding,
            counted_of_rows: Some(self.counted()),
        }
    }

    /// Returns the documents of a batch of complete rows, as ranges of the concatenated rows. Empty documents are left
    /// out.
    pub fn document_ranges(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let ends = self.document_ends().into_iter();
        let ranges = ends.map(|end| std::mem::replace(&mut start, end)..end);
        ranges.filter(|range| !range.is_empty()).collect()
    }

    /// Splits some [documents](Self::document_ranges) of a batch of complete rows over `ranks` ranks, and returns the
    /// part of rank `rank`. The documents are packed into one row, and each document is split in zigzag order. The
    /// result has a [`shard`](Self::shard) even if there is a single rank. With more than one rank, each document is
    /// padded to a multiple of `2 ranks` tokens. The part of each rank is padded to a multiple of `multiple` tokens,
    /// and has at least one token.
    ///
    /// # Errors
    ///
    /// [`DataError::Context`], which cannot occur for documents of this batch.
    pub fn documents_in_context(
        &self,
        documents: &[Range<usize>],
        (rank, ranks): (usize, usize),
        multiple: usize,
    ) -> Result<Self, DataError> {
        let split = ContextSplit::ZigzagPerDocument;
        let (of_document, of_row) = (split.divisor(ranks, 1), split.divisor(ranks, multiple));
        let mut rows = PaddedRows::default();
        for document in documents {
            rows.push(self, document.clone(), of_document);
        }
        let end = rows.tokens.len().max(1).next_multiple_of(of_row);
        rows.pad(end);
        let (rows, places) = rows.into_batch(self, 1, true);
        let (moved, of) = ((Some(places), rows.real.clone()), (rank, ranks));
        let starts = rows.documents.as_deref();
        let shard = SequenceShard::of_tokens([1, end], starts, moved, split, of)?;
        let rows = rows.with_further_tokens(self.further.len());
        Ok(rows.part_of(shard))
    }

    /// Returns the batch with each document padded to a multiple of `document`. Then a document of padding fills all
    /// rows to the same multiple of `row`, which is a multiple of `document`. Also returns the original places of the
    /// tokens.
    fn padded(&self, document: usize, row: usize) -> (Self, TokenPlaces) {
        let ends = self.document_ends();
        let mut rows: Vec<Vec<Range<usize>>> = vec![vec![]; self.rows];
        let mut start = 0;
        for end in ends {
            if end > start {
                rows[start / self.seq].push(start..end);
            }
            start = end;
        }
        let length = |documents: &Vec<Range<usize>>| {
            let padded = documents
                .iter()
                .map(|of| of.len().next_multiple_of(document));
            padded.sum::<usize>()
        };
        let seq = rows.iter().map(length).max().unwrap_or(0);
        let seq = seq.next_multiple_of(row);
        let mut padded = PaddedRows::default();
        for (number, documents) in rows.iter().enumerate() {
            for of in documents {
                padded.push(self, of.clone(), document);
            }
            padded.pad((number + 1) * seq);
        }
        padded.into_batch(self, self.rows, false)
    }

    /// Returns the positions of the tokens that are not padding, or `None` if no token is padding.
    pub fn real(&self) -> Option<&Arc<RealTokens>> {
        self.real.as_ref()
    }

    /// Returns the input tokens: `[rows, seq]`, row-major.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Returns the embedding lookups of the tokens, sorted by token: see
    /// [`Tokens::sorted`](burn_megatron::nn::Tokens::sorted).
    pub fn sorted(&self) -> &Arc<SortedLookups> {
        &self.sorted
    }

    /// Returns the inputs and targets of multi-token prediction, one element for each depth, starting with depth 1. See
    /// [`with_further_tokens`](Self::with_further_tokens).
    pub fn further(&self) -> &[FurtherTokens] {
        &self.further
    }

    /// Returns the padding that was added to complete rows so that [each document can be
    /// split](ContextSplit::ZigzagPerDocument) over the ranks.
    pub fn padding(&self) -> Padding {
        let [rows, seq] = match &self.shard {
            Some(shard) => shard.shape(),
            None => [self.rows, self.seq],
        };
        Padding {
            added: self.padding,
            all: (rows * seq) as u64,
        }
    }

    /// Returns the number of targets that are not ignored, counted in the complete rows. If the rows are split over a
    /// context group, this rank only holds a part of these targets.
    pub fn counted_of_rows(&self) -> u64 {
        self.counted_of_rows.unwrap_or_else(|| self.counted())
    }

    /// Returns the number of targets on this rank that are not ignored.
    pub fn counted(&self) -> u64 {
        let counted = self.targets.iter().filter(|target| **target != IGNORE);
        counted.count() as u64
    }
}

/// Rows in which each document is padded.
struct PaddedRows {
    tokens: Vec<i32>,
    targets: Vec<i32>,
    is_real: Vec<bool>,
    /// The index of each token in the concatenated rows of its original batch, or `None` for padding.
    places: Vec<Option<usize>>,
    /// The start of each document, then the end of the last one.
    starts: Vec<i32>,
}

impl Default for PaddedRows {
    fn default() -> Self {
        Self {
            tokens: vec![],
            targets: vec![],
            is_real: vec![],
            places: vec![],
            starts: vec![0],
        }
    }
}

impl PaddedRows {
    /// Adds a document of `batch`, padded to a multiple of `multiple`.
    fn push(&mut self, batch: &Batch, document: Range<usize>, multiple: usize) {
        let is_real = |token| batch.real.as_ref().is_none_or(|real| real.is_real()[token]);
        self.tokens.extend(&batch.tokens[document.clone()]);
        self.targets.extend(&batch.targets[document.clone()]);
        self.is_real.extend(document.clone().map(is_real));
        self.places.extend(document.map(Some));
        self.pad(self.tokens.len().next_multiple_of(multiple));
    }

    /// Returns `rows` rows of tokens of `batch`, without further tokens, and the places of the tokens.
    fn into_batch(self, batch: &Batch, rows: usize, in_global_batch: bool) -> (Batch, TokenPlaces) {
        let padding = self.places.iter().filter(|place| place.is_none()).count();
        let padded = Batch {
            padding: padding as u64,
            rows,
            seq: self.tokens.len() / rows.max(1),
            tokens: self.tokens,
            targets: self.targets,
            documents: Some(self.starts),
            shard: None,
            real: RealTokens::new(self.is_real, rows),
            counted_of_rows: None,
            sorted: Arc::default(),
            further: vec![],
        };
        let places = TokenPlaces {
            numbers: self.places,
            row_length: batch.seq,
            in_global_batch,
        };
        (padded, places)
    }

    /// Adds padding up to the length `to`, and ends the document.
    fn pad(&mut self, to: usize) {
        self.tokens.resize(to, 0);
        self.targets.resize(to, IGNORE);
        self.is_real.resize(to, false);
        self.places.resize(to, None);
        if self.starts.last() != Some(&(to as i32)) {
            self.starts.push(to as i32);
        }
    }
}
