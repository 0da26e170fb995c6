//! Windows, and batches of them.

use super::DataError;

/// A piece of a text and, for each token, the one that follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window<'a> {
    /// What the model reads: `[seq]`.
    pub tokens: &'a [u8],
    /// What it shall predict, `tokens` shifted by one: `[seq]`.
    pub targets: &'a [u8],
}

impl<'a> Window<'a> {
    /// `text` must have more than `start + seq` bytes.
    pub(super) fn at(text: &'a [u8], start: usize, seq: usize) -> Self {
        Self {
            tokens: &text[start..start + seq],
            targets: &text[start + 1..start + 1 + seq],
        }
    }
}

/// Windows of equal length as the rows of two integer matrices, ready to become tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// What the model reads: `[rows, seq]`, row by row.
    pub tokens: Vec<i32>,
    /// What it shall predict: `[rows, seq]`, row by row.
    pub targets: Vec<i32>,
    /// The number of windows.
    pub rows: usize,
    /// The number of tokens in a window.
    pub seq: usize,
}

impl Batch {
    /// Puts windows under each other in the order given.
    ///
    /// # Errors
    ///
    /// [`DataError::NoRows`] without a window; [`DataError::UnequalRows`] if lengths differ.
    pub fn new<'a>(windows: impl IntoIterator<Item = Window<'a>>) -> Result<Self, DataError> {
        let mut windows = windows.into_iter().peekable();
        let seq = windows.peek().ok_or(DataError::NoRows)?.tokens.len();
        let mut batch = Self {
            tokens: Vec::new(),
            targets: Vec::new(),
            rows: 0,
            seq,
        };
        for window in windows {
            // Both fields are public, so a window made elsewhere can have sides of different
            // lengths.
            for length in [window.tokens.len(), window.targets.len()] {
                if length != seq {
                    return Err(DataError::UnequalRows {
                        row: batch.rows,
                        length,
                        seq,
                    });
                }
            }
            batch
                .tokens
                .extend(window.tokens.iter().copied().map(i32::from));
            batch
                .targets
                .extend(window.targets.iter().copied().map(i32::from));
            batch.rows += 1;
        }
        Ok(batch)
    }
}
