//! Batches: samples stacked as rows.

use std::sync::Arc;

use burn_megatron_kernels::embedding::SortedLookups;

use super::{DataError, IGNORE, Sample};

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
    /// Sorted where the batch is made, which is in the thread that reads ahead.
    sorted: Arc<SortedLookups>,
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
            sorted: Arc::default(),
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

    /// Input tokens: `[rows, seq]`, row-major.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// The lookups of the tokens, sorted: see
    /// [`Tokens::sorted`](crate::nn::Tokens::sorted).
    pub fn sorted(&self) -> &Arc<SortedLookups> {
        &self.sorted
    }

    /// The number of targets that are not ignored.
    pub fn counted(&self) -> u64 {
        let counted = self.targets.iter().filter(|target| **target != IGNORE);
        counted.count() as u64
    }
}
