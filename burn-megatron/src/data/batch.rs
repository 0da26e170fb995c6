//! Samples under each other.

use super::{DataError, IGNORE, Sample};

/// Samples of equal length as the rows of two integer matrices, ready to become tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// What the model reads: `[rows, seq]`, row by row.
    pub tokens: Vec<i32>,
    /// What it shall predict: `[rows, seq]`, row by row.
    pub targets: Vec<i32>,
    /// The number of samples.
    pub rows: usize,
    /// The number of tokens in a sample.
    pub seq: usize,
    /// Where documents that see nothing of each other begin, in the rows laid end to end, and where the
    /// last one ends: `0, ..., rows * seq`. Nothing where every row is one piece.
    pub documents: Option<Vec<i32>>,
}

impl Batch {
    /// Puts samples under each other in the order given.
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
        };
        let mut documents = vec![];
        for sample in samples {
            // All fields are public, so a sample made elsewhere can have sides of different lengths.
            for length in [sample.tokens.len(), sample.targets.len()] {
                if length != seq {
                    let row = batch.rows;
                    return Err(DataError::UnequalRows { row, length, seq });
                }
            }
            let first = batch.rows * seq;
            match sample.documents.is_empty() {
                true => documents.push(first as i32),
                false => {
                    documents.extend(sample.documents.iter().map(|at| (first + at) as i32));
                    batch.documents = Some(vec![]);
                }
            }
            batch.tokens.extend(sample.tokens);
            batch.targets.extend(sample.targets);
            batch.rows += 1;
        }
        if batch.documents.is_some() {
            documents.push((batch.rows * seq) as i32);
            batch.documents = Some(documents);
        }
        Ok(batch)
    }

    /// The number of targets that have a loss.
    pub fn counted(&self) -> u64 {
        let counted = self.targets.iter().filter(|target| **target != IGNORE);
        counted.count() as u64
    }
}
