//! The real tokens of a batch, which are the tokens that are not padding.

use std::sync::Arc;

use super::context::SequenceShard;

/// The mask of the real tokens of a batch with padding.
///
/// Padding tokens do not count in the loss, and no real token attends to padding. Expert routers ignore padding: see
/// [`RoutedTokens`](super::moe::RoutedTokens).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealTokens {
    /// Whether each token of this rank is real, row by row.
    is_real: Vec<bool>,
    /// The number of real tokens in each row, over all ranks that share the rows.
    in_rows: Vec<usize>,
}

impl RealTokens {
    /// Creates the mask for `rows` complete rows, or returns `None` if no token is padding. `is_real` has one element
    /// per token, in row-major order.
    ///
    /// # Panics
    ///
    /// If the number of tokens is not a multiple of `rows`.
    pub fn new(is_real: Vec<bool>, rows: usize) -> Option<Arc<Self>> {
        if is_real.iter().all(|real| *real) {
            return None;
        }
        assert!(
            is_real.len().is_multiple_of(rows),
            "{} tokens in {rows} rows",
            is_real.len()
        );
        let of_row = |row: &[bool]| row.iter().filter(|real| **real).count();
        let in_rows = is_real.chunks(is_real.len() / rows).map(of_row).collect();
        Some(Arc::new(Self { is_real, in_rows }))
    }

    /// Returns the part of the mask for the tokens that this rank holds in `shard`.
    pub fn part(&self, shard: &SequenceShard) -> Arc<Self> {
        Arc::new(Self {
            is_real: shard.part(&self.is_real),
            in_rows: self.in_rows.clone(),
        })
    }

    /// Returns whether each token of this rank is real, in row-major order.
    pub fn is_real(&self) -> &[bool] {
        &self.is_real
    }

    /// Returns the number of real tokens of each document in complete rows. `ends` are the ends of the documents in
    /// the concatenated rows. `None` for `real` means that no token is padding.
    pub(super) fn in_documents(real: Option<&Self>, ends: &[usize]) -> Vec<usize> {
        let mut start = 0;
        let of_document = |&end: &usize| {
            let document = std::mem::replace(&mut start, end)..end;
            match real {
                Some(real) => real.is_real[document].iter().filter(|real| **real).count(),
                None => document.len(),
            }
        };
        ends.iter().map(of_document).collect()
    }

    /// Returns the number of real tokens in each row, over all ranks that share the rows.
    pub fn in_rows(&self) -> &[usize] {
        &self.in_rows
    }
}
