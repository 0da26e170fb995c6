//! Packs examples into rows.

use std::sync::Arc;

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use super::examples::Examples;
use crate::gpt::RandomState;
use crate::pack::pack;
use crate::{DataError, IGNORE, Sample, Samples};

/// Rows of `seq` tokens. A token only attends to tokens of the same example, and positions restart in each example. The
/// rest of a row is padded with token 0, as an example without targets.
pub(super) struct ChatRows {
    pub examples: Examples,
    seq: usize,
    /// The examples of each row.
    rows: Vec<Vec<u32>>,
}

impl ChatRows {
    /// Packs examples by best fit decreasing, or puts one example into each row.
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

    /// Returns the fraction of positions that hold a token.
    pub fn fill_ratio(&self) -> f64 {
        let inputs = self.examples.tokens() - self.examples.len();
        inputs as f64 / (self.len() * self.seq) as f64
    }

    /// Returns a row.
    pub fn sample(&self, row: usize) -> Sample {
        let mut sample = Sample::default();
        for example in &self.rows[row] {
            self.examples.append(*example as usize, &mut sample);
        }
        let real = sample.tokens.len();
        if real < self.seq {
            sample.documents.push(real);
            sample.padding = self.seq - real;
        }
        sample.tokens.resize(self.seq, 0);
        sample.targets.resize(self.seq, IGNORE);
        sample
    }
}

/// The rows of a run. Each epoch has all rows, in a different order. The number of epochs is unlimited.
pub(super) struct ChatSamples {
    rows: Arc<ChatRows>,
    seed: u64,
    /// The epoch that was read last, and its order.
    epoch: Mutex<(u64, Arc<[u32]>)>,
}

impl ChatSamples {
    /// Creates the samples of a run with a seed.
    pub fn new(rows: Arc<ChatRows>, seed: u64) -> Self {
        let first = order(&rows, seed, 0);
        Self {
            rows,
            seed,
            epoch: Mutex::new((0, first)),
        }
    }
}

/// Returns the order of the rows in an epoch.
fn order(rows: &ChatRows, seed: u64, epoch: u64) -> Arc<[u32]> {
    let mut order: Vec<u32> = (0..rows.len() as u32).collect();
    let key = [seed.to_le_bytes(), epoch.to_le_bytes()].concat();
    RandomState::new(xxh3_64(&key) as u32).shuffle(&mut order);
    order.into()
}

impl Samples for ChatSamples {
    fn seq(&self) -> usize {
        self.rows.seq
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        let rows = self.rows.len() as u64;
        let (epoch, place) = (number / rows, (number % rows) as usize);
        let mut last = self.epoch.lock();
        if last.0 != epoch {
            *last = (epoch, order(&self.rows, self.seed, epoch));
        }
        let row = last.1[place];
        drop(last);
        Ok(self.rows.sample(row as usize))
    }
}
