//! The real tokens of a batch, which are the tokens that are not padding.

use std::sync::Arc;

use super::context::SequenceShard;

/// The real tokens of a batch with padding.
///
/// Padding has no loss, and no real token attends to it. Expert routers ignore it: see
/// [`RoutedTokens`](super::moe::RoutedTokens).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RealTokens {
    /// Whether each token of this rank is real, row by row.
    is_real: Vec<bool>,
    /// The number of real tokens in each row, over all ranks that share the rows.
    in_rows: Vec<usize>,
}

impl RealTokens {
    /// Returns the real tokens of `rows` complete rows, or `None` if no token is padding.
    ///
    /// # Panics
    ///
    /// If `rows` does not divide the number of tokens.
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

    /// Returns the part of this rank of a context group.
    pub fn part(&self, shard: &SequenceShard) -> Arc<Self> {
        Arc::new(Self {
            is_real: shard.part(&self.is_real),
            in_rows: self.in_rows.clone(),
        })
    }

    /// Returns whether each token of this rank is real, row by row.
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
