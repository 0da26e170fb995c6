//! Batches: samples stacked as rows.

use std::ops::{Add, Range};
use std::sync::Arc;

use burn_megatron_kernels::embedding::SortedLookups;

use super::{DataError, FurtherTokens, IGNORE, Sample};
use crate::mesh::ContextSplit;
use crate::nn::context::SequenceShard;

/// Samples of equal length, stacked as the rows of two integer matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    tokens: Vec<i32>,
    /// Target tokens: `[rows, seq]`, row-major.
    pub targets: Vec<i32>,
    /// The number of samples.
    pub rows: usize,
    /// The number of tokens in a sample.
    pub seq: usize,
    /// The starts of the documents in the concatenated rows, then the end of the last one: `0, ..., rows * seq`
    /// (as `cu_seqlens`). Attention does not cross documents. `None` if every row is one document.
    pub documents: Option<Vec<i32>>,
    /// Which tokens of each row are here, where the ranks of a context group share the rows; then `seq` counts
    /// these, and `documents` is `None`.
    pub shard: Option<Arc<SequenceShard>>,
    /// The tokens that were added to whole rows, where each document is split.
    padding: u64,
    /// The targets of whole rows that are not ignored, where the rows are shared.
    counted_of_rows: Option<u64>,
    /// Sorted where the batch is made, which is in the thread that reads ahead.
    sorted: Arc<SortedLookups>,
    /// By depth, from 1 on.
    further: Vec<FurtherTokens>,
}

/// Tokens that were added to documents.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Padding {
    /// Those.
    pub added: u64,
    /// All tokens, those included.
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
    /// Stacks samples in the given order.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] without a sample; [`DataError::UnequalRows`] if lengths differ.
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
            counted_of_rows: None,
            sorted: Arc::default(),
            further: vec![],
        };
        let mut documents = vec![];
        for sample in samples {
            // All fields are public, so the lengths of a sample may differ.
            for length in [sample.tokens.len(), sample.targets.len()] {
                if length != seq {
                    let row = batch.rows;
                    return Err(DataError::UnequalRows { row, length, seq });
                }
            }
            let first = batch.rows * seq;
            if sample.documents.is_empty() {
                documents.push(first as i32)
            } else {
                documents.extend(sample.documents.iter().map(|at| (first + at) as i32));
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
        Ok(batch)
    }

    /// The same tokens in rows of `length`, which divides whole rows. A row is a part of the document that it was cut
    /// out of, so that positions begin in each. A part of rows is returned as it is.
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
        Self {
            rows,
            seq: length,
            documents,
            further: vec![],
            ..self
        }
    }

    /// The same with the tokens that multi-token prediction reads and predicts at depths 1 to `depths`. Call it on whole rows,
    /// before they are shared; a part of rows is returned as it is.
    pub fn with_further_tokens(mut self, depths: usize) -> Self {
        if self.shard.is_none() && self.further.len() != depths {
            let of_depth = |depth| {
                let ends = self.document_ends().into_iter();
                FurtherTokens::new(&self.tokens, &self.targets, ends, depth)
            };
            self.further = (1..=depths).map(of_depth).collect();
        }
        self
    }

    /// The ends of the documents in the concatenated rows.
    fn document_ends(&self) -> Vec<usize> {
        match &self.documents {
            Some(starts) => starts[1..].iter().map(|end| *end as usize).collect(),
            None => (1..=self.rows).map(|row| row * self.seq).collect(),
        }
    }

    /// The part of rank `rank` of a context group of `ranks`, of a batch with whole rows. Targets were shifted before,
    /// so that each stays with its token. For [`ContextSplit::ZigzagPerDocument`], documents are padded to a length
    /// that can be divided, and rows to the longest one; targets of the padding are ignored.
    ///
    /// # Errors
    ///
    /// [`DataError::Context`] for rows that cannot be divided, also over `tensor` ranks that share each part.
    pub fn in_context(
        mut self,
        split: ContextSplit,
        (rank, ranks): (usize, usize),
        tensor: usize,
    ) -> Result<Self, DataError> {
        if self.shard.is_some() || ranks == 1 {
            return Ok(self);
        }
        if split == ContextSplit::ZigzagPerDocument {
            let depths = self.further.len();
            self = self.padded(split.divisor(ranks, 1), split.divisor(ranks, tensor));
            self = self.with_further_tokens(depths);
        }
        split.check(self.seq, ranks, tensor)?;
        let shape = [self.rows, self.seq];
        let documents = self.documents.as_deref();
        let shard = SequenceShard::new(shape, documents, split, (rank, ranks))?;
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
            shard: Some(shard),
            padding: self.padding,
            counted_of_rows: Some(self.counted()),
        }
    }

    /// The documents of whole rows, as ranges of the concatenated rows; empty ones are left out.
    pub fn document_ranges(&self) -> Vec<Range<usize>> {
        let mut start = 0;
        let ends = self.document_ends().into_iter();
        let ranges = ends.map(|end| std::mem::replace(&mut start, end)..end);
        ranges.filter(|range| !range.is_empty()).collect()
    }

    /// The part that rank `rank` of `ranks` has of some [documents](Self::document_ranges) of a batch of whole rows. They are
    /// packed into one row, and each is split as a zigzag; of one rank it is a part too. Padding makes each document a
    /// multiple of `2 ranks`, on more than one rank, and the part of each rank a multiple of `multiple`, at least one token.
    ///
    /// # Errors
    ///
    /// [`DataError::Context`] cannot occur for documents of this batch.
    pub fn documents_in_context(
        &self,
        documents: &[Range<usize>],
        (rank, ranks): (usize, usize),
        multiple: usize,
    ) -> Result<Self, DataError> {
        let split = ContextSplit::ZigzagPerDocument;
        let (of_document, of_row) = (split.divisor(ranks, 1), split.divisor(ranks, multiple));
        let (mut tokens, mut targets, mut places) = (vec![], vec![], vec![]);
        let mut starts = vec![0];
        let mut pad =
            |tokens: &mut Vec<i32>, targets: &mut Vec<i32>, places: &mut Vec<usize>, to| {
                tokens.resize(to, 0);
                targets.resize(to, IGNORE);
                places.resize(to, 0);
                if starts.last() != Some(&(to as i32)) {
                    starts.push(to as i32);
                }
            };
        for document in documents {
            tokens.extend(&self.tokens[document.clone()]);
            targets.extend(&self.targets[document.clone()]);
            places.extend(document.clone());
            let end = tokens.len().next_multiple_of(of_document);
            pad(&mut tokens, &mut targets, &mut places, end);
        }
        let end = tokens.len().max(1).next_multiple_of(of_row);
        pad(&mut tokens, &mut targets, &mut places, end);
        let real: usize = documents.iter().map(Range::len).sum();
        let shard = SequenceShard::of_documents(&starts, places, (rank, ranks))?;
        let rows = Self {
            padding: (end - real) as u64,
            tokens,
            targets,
            rows: 1,
            seq: end,
            documents: Some(starts),
            shard: None,
            counted_of_rows: None,
            sorted: Arc::default(),
            further: vec![],
        };
        let rows = rows.with_further_tokens(self.further.len());
        Ok(rows.part_of(shard))
    }

    /// Each document padded to a multiple of `document`, and the rows by a document of padding to the same multiple of
    /// `row`, which is one of `document`.
    fn padded(self, document: usize, row: usize) -> Self {
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
        let (mut tokens, mut targets) = (vec![], vec![]);
        let mut starts = vec![0];
        for documents in &rows {
            let past = tokens.len() + seq;
            for of in documents {
                tokens.extend(&self.tokens[of.clone()]);
                targets.extend(&self.targets[of.clone()]);
                let end = starts[starts.len() - 1] as usize + of.len().next_multiple_of(document);
                tokens.resize(end, 0);
                targets.resize(end, IGNORE);
                starts.push(end as i32);
            }
            if tokens.len() < past {
                tokens.resize(past, 0);
                targets.resize(past, IGNORE);
                starts.push(past as i32);
            }
        }
        Self {
            padding: (tokens.len() - self.tokens.len()) as u64,
            tokens,
            targets,
            seq,
            documents: Some(starts),
            further: vec![],
            ..self
        }
    }

    /// Input tokens: `[rows, seq]`, row-major.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// The lookups of the tokens, sorted: see
    /// [`Tokens::sorted`](crate::nn::Tokens::sorted).
    pub fn sorted(&self) -> &Arc<SortedLookups> {
        &self.sorted
    }

    /// What multi-token prediction reads and predicts, by depth from 1 on: see
    /// [`with_further_tokens`](Self::with_further_tokens).
    pub fn further(&self) -> &[FurtherTokens] {
        &self.further
    }

    /// The tokens that were added to whole rows so that their documents can be
    /// [split each](ContextSplit::ZigzagPerDocument).
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

    /// The number of targets that are not ignored in the whole rows, of which a rank of a context group has a part.
    pub fn counted_of_rows(&self) -> u64 {
        self.counted_of_rows.unwrap_or_else(|| self.counted())
    }

    /// The number of targets that are not ignored.
    pub fn counted(&self) -> u64 {
        let counted = self.targets.iter().filter(|target| **target != IGNORE);
        counted.count() as u64
    }
}
