//! Builds the document, sample and shuffle index of the GPT data set.

use std::ops::Range;

use super::{Epochs, NpyArray, NpyInt, RandomState, SamplingError};

/// The document, sample and shuffle index of a data set.
#[derive(Debug)]
pub struct GptIndices {
    /// The document index: the numbers of the sequences of all epochs, in the order in which they are read.
    /// `[epochs * sequences]`, `i32`.
    pub documents: NpyArray,
    /// The sample index: the start of each sample, followed by the end of the last sample. Each entry is a position in
    /// `documents` and a token offset in the sequence at this position. `[samples + 1, 2]`, `i32`, or `i64` if the
    /// positions do not fit into `i32`.
    pub samples: NpyArray,
    /// The shuffle index: the order in which the samples are used. `[samples]`, `u32`, or `i64` if the numbers do not
    /// fit into `u32`.
    pub shuffle: NpyArray,
}

impl GptIndices {
    /// Builds the indices for the sequences in `range`. `lengths` contains the lengths of all sequences of the file.
    ///
    /// # Errors
    ///
    /// [`SamplingError::TooManySequences`] if the numbers of the sequences do not fit into an `i32`.
    pub fn build(
        lengths: &[i32],
        range: Range<usize>,
        epochs: &Epochs,
        seq: usize,
        extra: usize,
        seed: u32,
    ) -> Result<Self, SamplingError> {
        let sequences = lengths.len();
        let (Ok(first), Ok(end)) = (i32::try_from(range.start), i32::try_from(range.end)) else {
            return Err(SamplingError::TooManySequences { sequences });
        };
        let mut random = RandomState::new(seed);
        let documents = document_index(first..end, epochs, &mut random);
        let walk = SampleWalk {
            lengths,
            documents: &documents,
            seq: seq as u64,
            extra: extra as u64,
        };
        let samples = match i32::try_from(documents.len()) {
            Ok(_) => walk.samples(epochs.samples, |at| at as i32),
            Err(_) => walk.samples(epochs.samples, |at| at as i64),
        };
        let shuffle = if epochs.samples < u64::from(u32::MAX) - 1 {
            shuffle_index(epochs, &mut random, |sample| sample as u32)
        } else {
            shuffle_index(epochs, &mut random, |sample| sample as i64)
        };
        Ok(Self {
            documents: NpyArray::new(&documents, &[documents.len()]),
            samples,
            shuffle,
        })
    }
}

/// Returns the document index. Each epoch has every document, and the last epoch may be shuffled separately.
fn document_index(range: Range<i32>, epochs: &Epochs, random: &mut RandomState) -> Vec<i32> {
    let together = epochs.count - u64::from(epochs.before_last.is_some());
    let mut documents: Vec<i32> = (0..together).flat_map(|_| range.clone()).collect();
    random.shuffle(&mut documents);
    if epochs.before_last.is_some() {
        let mut last: Vec<i32> = range.collect();
        random.shuffle(&mut last);
        documents.append(&mut last);
    }
    documents
}

/// A walk over the concatenated documents.
struct SampleWalk<'a> {
    lengths: &'a [i32],
    documents: &'a [i32],
    seq: u64,
    extra: u64,
}

impl SampleWalk<'_> {
    /// Returns the sample index: a sample starts every `seq` tokens.
    fn samples<T: NpyInt>(&self, count: u64, int: impl Fn(u64) -> T) -> NpyArray {
        let mut begins = Vec::with_capacity(2 * (count as usize + 1));
        begins.extend([int(0), int(0)]);
        let (mut place, mut offset) = (0, 0);
        for _ in 0..count {
            let mut left = self.seq + self.extra;
            loop {
                let length = self.length(place);
                if left <= length - offset {
                    offset += left - self.extra;
                    break;
                }
                if place + 1 == self.documents.len() {
                    // The last sample is incomplete.
                    offset = length.saturating_sub(self.extra);
                    break;
                }
                left -= length - offset;
                (place, offset) = (place + 1, 0);
            }
            begins.extend([int(place as u64), int(offset)]);
        }
        NpyArray::new(&begins, &[count as usize + 1, 2])
    }

    fn length(&self, place: usize) -> u64 {
        self.lengths[self.documents[place] as usize] as u64
    }
}

/// Returns the shuffle index. The samples of the last epoch may be shuffled separately.
fn shuffle_index<T: NpyInt>(
    epochs: &Epochs,
    random: &mut RandomState,
    int: impl Fn(u64) -> T,
) -> NpyArray {
    let mut samples: Vec<T> = (0..epochs.samples).map(int).collect();
    let before = epochs.before_last.unwrap_or(epochs.samples);
    let (first, last) = samples.split_at_mut(before as usize);
    random.shuffle(first);
    random.shuffle(last);
    NpyArray::new(&samples, &[samples.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares only the values of wide indices, because the wide types need more than 2^31 documents or 2^32 samples.
    #[test]
    fn wide_indices_have_the_same_numbers() {
        let (lengths, documents) = ([5, 0, 9, 2], [2, 0, 3, 1, 2, 0, 1, 3]);
        let walk = SampleWalk {
            lengths: &lengths,
            documents: &documents,
            seq: 4,
            extra: 1,
        };
        let (narrow, wide) = (
            walk.samples(7, |at| at as i32),
            walk.samples(7, |at| at as i64),
        );
        assert_eq!(narrow.shape(), [8, 2]);
        assert!(narrow.iter().eq(wide.iter()));
        let epochs = Epochs::new(16, 4, 1, Some(7), true).unwrap();
        let narrow = shuffle_index(&epochs, &mut RandomState::new(3), |sample| sample as u32);
        let wide = shuffle_index(&epochs, &mut RandomState::new(3), |sample| sample as i64);
        assert!(narrow.iter().eq(wide.iter()));
    }
}
