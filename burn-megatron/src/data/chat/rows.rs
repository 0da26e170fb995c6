//! Examples packed into rows.

use std::sync::Arc;

use super::examples::Examples;
use crate::data::gpt::{RandomState, SamplingError};
use crate::data::pack::pack;
use crate::data::{DataError, IGNORE, Sample, Samples};

/// Rows of `seq` tokens. Attention does not cross examples, and positions restart at each; the rest of a row is
/// padded with token 0, as an example without targets.
pub(super) struct ChatRows {
    pub examples: Examples,
    seq: usize,
    /// The examples of each row.
    rows: Vec<Vec<u32>>,
}

impl ChatRows {
    /// Packs examples by best fit decreasing, or one into each row.
    pub fn new(examples: Examples, seq: usize, packing: bool) -> Self {
        let all = 0..examples.len();
        let rows = if packing {
            let lengths = all.map(|example| (example, examples.inputs(example)));
            let rows = pack(lengths, seq).into_iter();
            rows.map(|row| row.iter().map(|segment| segment.sequence).collect())
                .collect()
        } else {
            all.map(|example| vec![example as u32]).collect()
        };
        Self {
            examples,
            seq,
            rows,
        }
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The share of positions that hold a token.
    pub fn fill_ratio(&self) -> f64 {
        let inputs = self.examples.tokens() - self.examples.len();
        inputs as f64 / (self.len() * self.seq) as f64
    }

    /// A row.
    pub fn sample(&self, row: usize) -> Sample {
        let mut sample = Sample::default();
        for example in &self.rows[row] {
            self.examples.append(*example as usize, &mut sample);
        }
        if sample.tokens.len() < self.seq {
            sample.documents.push(sample.tokens.len());
        }
        sample.tokens.resize(self.seq, 0);
        sample.targets.resize(self.seq, IGNORE);
        sample
    }
}

/// The rows of a run: all of them in each epoch, in an order of its own.
pub(super) struct ChatSamples {
    rows: Arc<ChatRows>,
    order: Vec<u32>,
}

impl ChatSamples {
    /// At least `samples` rows, which is at least one epoch. The first ones are the same for any number of samples.
    pub fn new(rows: Arc<ChatRows>, seed: u64, samples: u64) -> Self {
        let mut random = RandomState::new((seed ^ (seed >> 32)) as u32);
        let mut order = vec![];
        loop {
            let mut epoch: Vec<u32> = (0..rows.len() as u32).collect();
            random.shuffle(&mut epoch);
            order.append(&mut epoch);
            if order.len() as u64 >= samples {
                return Self { rows, order };
            }
        }
    }
}

impl Samples for ChatSamples {
    fn seq(&self) -> usize {
        self.rows.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let row = usize::try_from(number)
            .ok()
            .and_then(|number| self.order.get(number));
        let samples = self.order.len() as u64;
        let row = row.ok_or(SamplingError::NoSuchSample { number, samples })?;
        Ok(self.rows.sample(*row as usize))
    }
}
