//! Packs documents of given lengths into rows (samples).

use burn_megatron_data::{DataError, IGNORE, Sample, Samples};

use burn_megatron_cli::internal::Error;
use burn_megatron_cli::internal::RandomTokens;

pub const VOCABULARY: usize = 256;

/// Returns the lengths of documents with a long-tailed distribution. There is one document of `tokens` tokens. For each
/// shorter length, `tokens / 2`, `tokens / 4` and so on to `tokens / 64`, the documents have `tokens / 2` tokens in
/// total.
pub fn long_tail(tokens: usize) -> Vec<usize> {
    let halves = (1..=6).map(|halving| (tokens >> halving, 1 << (halving - 1)));
    let shorter = halves.filter(|(length, _)| *length > 0);
    let shorter = shorter.flat_map(|(length, count)| vec![length; count]);
    [tokens].into_iter().chain(shorter).collect()
}

/// The rows of a global batch, which is the same in every step.
#[derive(Clone)]
pub struct DocumentRows {
    tokens: RandomTokens,
    /// The lengths of the documents of each row.
    pub lengths: Vec<Vec<usize>>,
}

impl DocumentRows {
    /// Packs the documents into rows. The longest document comes first, and each document goes into the fullest row
    /// that has room for it.
    pub fn new(lengths: &[usize], row: usize) -> Result<Self, Error> {
        let invalid = |length: &&usize| **length == 0 || **length > row;
        if let Some(length) = lengths.iter().find(invalid) {
            return Err(format!(
                "invalid --documents {length}: expected lengths of 1 to --tokens {row}"
            )
            .into());
        }
        let mut sorted = lengths.to_vec();
        sorted.sort_by_key(|length| std::cmp::Reverse(*length));
        let mut rows: Vec<Vec<usize>> = vec![];
        for length in sorted {
            let used = |of: &Vec<usize>| of.iter().sum::<usize>();
            let fitting = rows.iter_mut().filter(|of| used(of) + length <= row);
            match fitting.max_by_key(|of| used(of)) {
                Some(of) => of.push(length),
                None => rows.push(vec![length]),
            }
        }
        Ok(Self {
            tokens: RandomTokens {
                vocabulary: VOCABULARY,
                length: row,
                seed: 1,
            },
            lengths: rows,
        })
    }
}

impl Samples for DocumentRows {
    fn seq(&self) -> usize {
        self.tokens.length
    }

    /// Returns a sample. The rest of its row is a document without targets.
    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let number = number % self.lengths.len() as u64;
        let mut sample = self.tokens.sample(number)?;
        let mut end = 0;
        for length in &self.lengths[number as usize] {
            sample.documents.push(end);
            end += length;
        }
        if end < sample.targets.len() {
            sample.documents.push(end);
            sample.targets[end..].fill(IGNORE);
        }
        Ok(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_that_no_row_has_room_for_is_refused() {
        let error = DocumentRows::new(&[3, 9], 8).err().unwrap().to_string();
        assert!(error.contains("--documents 9: expected lengths of 1 to --tokens 8"));
    }
}
