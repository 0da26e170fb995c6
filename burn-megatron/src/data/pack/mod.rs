//! Documents side by side in rows, of which none sees the others.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::gpt::{FiniteSamples, GptOptions, Part, RandomState, SamplingError, Split};
use super::gpt::{check_vocabulary, part_range};
use super::indexed::IndexedFile;
use super::{DataError, IGNORE, Sample, Samples};

/// The sequences of a part of token files, laid into rows.
///
/// Longer ones are cut into pieces of a row each, and what is left. Each piece is one document of its row:
/// tokens see nothing of other pieces, and positions begin at 0. The last token of a piece has the one that
/// follows in its sequence as its target; the last of a sequence has no loss. What is left of a row is filled
/// with 0, a document of its own that has no loss. Every token stands in exactly one row of an epoch.
///
/// Pieces go, the longest first, where the least space is left that they fit into (best fit decreasing:
/// Johnson, "Near-optimal bin packing algorithms", MIT 1973). Rows of each epoch come in a random order.
pub struct Packed {
    file: Arc<IndexedFile>,
    options: GptOptions,
    rows: Vec<Row>,
    /// The rows of all epochs in their order.
    order: Vec<u32>,
}

/// The pieces of a row.
type Row = Vec<Piece>;

/// A part of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    sequence: u32,
    offset: u32,
    length: u32,
}

impl Packed {
    /// At least `samples` rows, over as many epochs as that takes; those of one epoch where no number is
    /// given. `reset_attention`, `drop_last` and `extra_token` are about samples that run over the ends of
    /// documents, and make no difference here.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] where the options or the tokens do not suffice.
    pub fn new(
        file: Arc<IndexedFile>,
        split: &Split,
        part: Part,
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

    /// Rows of an epoch.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The share of places that hold a token.
    pub fn filled(&self) -> f64 {
        let tokens = self.rows.iter().flatten().map(|piece| piece.length as u64);
        tokens.sum::<u64>() as f64 / (self.rows.len() * self.options.seq) as f64
    }

    /// Appends a piece and the targets of its tokens.
    fn lay(&self, piece: Piece, sample: &mut Sample) -> Result<(), DataError> {
        let (sequence, length) = (piece.sequence as usize, piece.length as usize);
        let all = self.file.length(sequence).unwrap_or(0);
        let follows = usize::from(piece.offset as usize + length < all);
        let mut text = vec![];
        let offset = piece.offset as usize;
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

impl Samples for Packed {
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
        for piece in &self.rows[*row as usize] {
            self.lay(*piece, &mut sample)?;
        }
        let (seq, real) = (self.options.seq, sample.tokens.len());
        if let (Some(eod), true) = (self.options.eod, self.options.eod_mask_loss) {
            let ends = (0..real).filter(|place| sample.tokens[*place] == eod);
            ends.for_each(|end| sample.targets[end] = IGNORE);
        }
        if real < seq {
            sample.documents.push(real);
        }
        sample.tokens.resize(seq, 0);
        sample.targets.resize(seq, IGNORE);
        Ok(sample)
    }
}

impl FiniteSamples for Packed {
    fn count(&self) -> u64 {
        self.order.len() as u64
    }
}

/// Lays sequences of these numbers and lengths into rows of `seq` tokens.
fn pack(lengths: impl Iterator<Item = (usize, usize)>, seq: usize) -> Vec<Row> {
    let mut rows = vec![];
    // Rows that are not full: the space that is left, and their number.
    let mut open = BTreeSet::new();
    for piece in longest_first(lengths, seq) {
        let length = piece.length as usize;
        let fitting = open.range((length, 0)..).next().copied();
        let (space, row) = fitting.unwrap_or_else(|| {
            rows.push(vec![]);
            (seq, rows.len() - 1)
        });
        open.remove(&(space, row));
        rows[row].push(piece);
        if space > length {
            open.insert((space - length, row));
        }
    }
    rows
}

/// Sequences as pieces of at most `seq` tokens; those of equal length in the order they came in.
fn longest_first(lengths: impl Iterator<Item = (usize, usize)>, seq: usize) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = lengths
        .flat_map(|(sequence, length)| {
            (0..length).step_by(seq).map(move |offset| Piece {
                sequence: sequence as u32,
                offset: offset as u32,
                length: (length - offset).min(seq) as u32,
            })
        })
        .collect();
    pieces.sort_by_key(|piece| std::cmp::Reverse(piece.length));
    pieces
}

#[cfg(test)]
mod tests;
