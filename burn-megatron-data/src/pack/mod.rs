//! Sequence packing: several documents are packed into one sample. Tokens do not attend to other documents of their
//! sample.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::gpt::{FiniteSamples, GptOptions, RandomState, SamplingError, Split, SplitPart};
use super::gpt::{check_vocabulary, part_range};
use super::indexed::IndexedDataset;
use super::{DataError, IGNORE, Sample, Samples};

/// The sequences of one part of token files (training, validation or test), packed into rows. Each row is one sample.
///
/// A sequence that is longer than a row is cut into segments of the length of a row, and a shorter last segment. Each
/// segment is a separate document of its row: its tokens do not attend to other segments, and positions restart. The
/// target of the last token of a segment is the next token of the sequence. The last token of a sequence has no target.
/// The rest of a row is padded with token 0, as a document without targets. Every token is in exactly one row of an
/// epoch.
///
/// Segments are placed in order of decreasing length. Each segment is placed into the row with the least remaining
/// space that is sufficient for the segment (best fit decreasing: Johnson, "Near-optimal bin packing algorithms", MIT
/// 1973). Rows are shuffled in each epoch.
///
/// ```
/// use std::sync::Arc;
///
/// use burn_megatron_data::gpt::{GptOptions, Split, SplitPart};
/// use burn_megatron_data::indexed::{IndexedDataset, IndexedDatasetBuilder, TokenType};
/// use burn_megatron_data::{IGNORE, PackedSamples, Samples};
///
/// let folder = tempfile::tempdir()?;
/// let prefix = folder.path().join("corpus");
/// let mut writer = IndexedDatasetBuilder::create(&prefix, TokenType::for_vocabulary(256))?;
/// writer.document(&[1, 2, 3, 4, 5])?;
/// writer.document(&[6, 7, 8])?;
/// writer.finish()?;
/// let file = Arc::new(IndexedDataset::open(&prefix)?);
/// let all: Split = "1".parse()?;
/// let packed = PackedSamples::new(file, &all, SplitPart::Train, None, &GptOptions::new(8, 1))?;
/// assert_eq!((packed.rows(), packed.fill_ratio()), (1, 1.0));
/// let row = packed.sample(0)?;
/// assert_eq!(row.documents, [0, 5]);
/// assert_eq!(row.targets, [2, 3, 4, 5, IGNORE, 7, 8, IGNORE]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PackedSamples {
    file: Arc<IndexedDataset>,
    options: GptOptions,
    rows: Vec<Row>,
    /// The rows of all epochs, in order.
    order: Vec<u32>,
}

/// The segments of a row.
pub(super) type Row = Vec<PackedSegment>;

/// A range of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedSegment {
    pub sequence: u32,
    offset: u32,
    length: u32,
}

impl PackedSamples {
    /// Packs the sequences of a part of token files into at least `samples` rows, with the necessary number of epochs.
    /// `None` means one epoch. The fields of `options` that apply to documents which are cut into rows have no effect,
    /// because each sequence is a separate document of its row.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for invalid options or too few tokens.
    pub fn new(
        file: Arc<IndexedDataset>,
        split: &Split,
        part: SplitPart,
        samples: Option<u64>,
        options: &GptOptions,
    ) -> Result<Self, DataError> {
        let seed = options.check()?;
        let range = part_range(&file, split, part)?;
        let sequences = range.len();
        if u32::try_from(file.sequences()).is_err() {
            return Err(SamplingError::TooManySequences { sequences }.into());
        }
        let lengths = range.map(|sequence| (sequence, file.length(sequence).unwrap_or(0)));
        let rows = pack(lengths, options.seq);
        if rows.is_empty() {
            return Err(SamplingError::TooFewTokens {
                prefix: file.prefix().to_path_buf(),
                part,
                tokens: 0,
                sequences,
                all_sequences: file.sequences(),
                seq: options.seq,
                needed: 1,
            }
            .into());
        }
        let epochs = samples.map_or(1, |samples| samples.div_ceil(rows.len() as u64).max(1));
        let mut random = RandomState::new(seed);
        let mut order = vec![];
        for _ in 0..epochs {
            let mut epoch: Vec<u32> = (0..rows.len() as u32).collect();
            random.shuffle(&mut epoch);
            order.append(&mut epoch);
        }
        Ok(Self {
            file,
            options: options.clone(),
            rows,
            order,
        })
    }

    /// Returns the number of rows, which is the number of samples, per epoch.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Returns the fraction of the positions in all rows that contain a token instead of padding.
    pub fn fill_ratio(&self) -> f64 {
        let tokens = self
            .rows
            .iter()
            .flatten()
            .map(|segment| segment.length as u64);
        tokens.sum::<u64>() as f64 / (self.rows.len() * self.options.seq) as f64
    }

    /// Appends a segment with its targets.
    fn append_segment(&self, segment: PackedSegment, sample: &mut Sample) -> Result<(), DataError> {
        let (sequence, length) = (segment.sequence as usize, segment.length as usize);
        let all = self.file.length(sequence).unwrap_or(0);
        let follows = usize::from(segment.offset as usize + length < all);
        let mut text = vec![];
        let offset = segment.offset as usize;
        self.file
            .read(sequence, offset, length + follows, &mut text)?;
        check_vocabulary(&self.file, sequence, &text, self.options.vocabulary)?;
        sample.documents.push(sample.tokens.len());
        sample.tokens.extend(&text[..length]);
        sample.targets.extend(&text[1..]);
        sample.targets.resize(sample.tokens.len(), IGNORE);
        Ok(())
    }
}

impl Samples for PackedSamples {
    fn seq(&self) -> usize {
        self.options.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let samples = self.count();
        let row = usize::try_from(number).ok();
        let Some(row) = row.and_then(|number| self.order.get(number)) else {
            return Err(SamplingError::NoSuchSample { number, samples }.into());
        };
        let mut sample = Sample::default();
        for segment in &self.rows[*row as usize] {
            self.append_segment(*segment, &mut sample)?;
        }
        let (seq, real) = (self.options.seq, sample.tokens.len());
        if let (Some(eod), true) = (self.options.eod, self.options.eod_mask_loss) {
            let ends = (0..real).filter(|place| sample.tokens[*place] == eod);
            ends.for_each(|end| sample.targets[end] = IGNORE);
        }
        if real < seq {
            sample.documents.push(real);
            sample.padding = seq - real;
        }
        sample.tokens.resize(seq, 0);
        sample.targets.resize(seq, IGNORE);
        Ok(sample)
    }
}

impl FiniteSamples for PackedSamples {
    fn count(&self) -> u64 {
        self.order.len() as u64
    }
}

/// Packs sequences, given as index and length, into rows of `seq` tokens.
pub(super) fn pack(lengths: impl Iterator<Item = (usize, usize)>, seq: usize) -> Vec<Row> {
    let mut rows = vec![];
    // Rows that are not full, as (space left, row).
    let mut open = BTreeSet::new();
    for segment in longest_first(lengths, seq) {
        let length = segment.length as usize;
        let fitting = open.range((length, 0)..).next().copied();
        let (space, row) = fitting.unwrap_or_else(|| {
            rows.push(vec![]);
            (seq, rows.len() - 1)
        });
        open.remove(&(space, row));
        rows[row].push(segment);
        if space > length {
            open.insert((space - length, row));
        }
    }
    rows
}

/// Cuts sequences into segments of at most `seq` tokens, sorted by length. Segments of equal length keep their order.
fn longest_first(lengths: impl Iterator<Item = (usize, usize)>, seq: usize) -> Vec<PackedSegment> {
    let mut segments: Vec<PackedSegment> = lengths
        .flat_map(|(sequence, length)| {
            (0..length).step_by(seq).map(move |offset| PackedSegment {
                sequence: sequence as u32,
                offset: offset as u32,
                length: (length - offset).min(seq) as u32,
            })
        })
        .collect();
    segments.sort_by_key(|segment| std::cmp::Reverse(segment.length));
    segments
}

#[cfg(test)]
mod tests;
