//! Reads samples as rows of a rank, ahead of the steps.

use std::ops::Range;
use std::sync::Arc;

use super::BatchPlan;
use crate::hooks::{BatchSizes, SequenceWarmup, row_length};
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{ContextSplit, ContextSplitError};
use burn_megatron::nn::tp_comm_overlap::sequence_multiple;
use burn_megatron_data::{Batch, DataError, Prefetcher, Sample, Samples};

impl BatchPlan {
    /// Reads the micro-batches of `steps` in a background thread, up to two steps ahead. Before them there were `before`
    /// samples.
    pub(crate) fn read_ahead(
        &self,
        samples: Arc<dyn Samples>,
        steps: Range<usize>,
        before: u64,
    ) -> Result<Prefetcher, DataError> {
        let ready = match self.splits_steps() {
            true => 2,
            false => 2 * self.micro_batches(steps.end),
        };
        let rows = self.rows_from((steps.start, before));
        let numbers = self.own_numbers(steps, before);
        Prefetcher::new(Arc::new(RankSamples { samples, rows }), numbers, ready)
    }
}

/// The part of each batch that a rank of a context group has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextPart {
    split: ContextSplit,
    rank: usize,
    ranks: usize,
    /// The tensor ranks that share it.
    tensor: usize,
    /// Padded rows on the rank have a multiple of this number of tokens.
    multiple: usize,
    /// Of multi-token prediction.
    further_depths: usize,
}

impl ContextPart {
    pub fn of(groups: &ParallelContext, further_depths: usize) -> Self {
        let (config, context) = (groups.config(), groups.context());
        Self {
            split: config.context_split,
            rank: context.rank(),
            ranks: context.size(),
            tensor: if config.sequence_parallel {
                config.tensor
            } else {
                1
            },
            multiple: if config.sequence_parallel {
                sequence_multiple(config)
            } else {
                1
            },
            further_depths,
        }
    }

    /// The same for whole rows.
    pub fn of_one_rank(self) -> Self {
        Self { ranks: 1, ..self }
    }

    /// Checks the length of a whole row. A split per document pads documents, so that any row of at least `2 context`
    /// tokens can be split.
    pub fn check(self, length: usize) -> Result<(), ContextSplitError> {
        match self.split {
            _ if self.ranks == 1 => Ok(()),
            ContextSplit::ZigzagPerDocument if length >= 2 * self.ranks => Ok(()),
            split => split.check(length, self.ranks, self.tensor),
        }
    }

    /// The part of a batch of whole rows, or of its rows that this is already.
    pub fn of_batch(self, batch: Batch) -> Result<Batch, DataError> {
        let batch = batch.with_further_tokens(self.further_depths);
        let tensor = match self.split {
            ContextSplit::ZigzagPerDocument => self.multiple,
            _ => self.tensor,
        };
        batch.in_context(self.split, (self.rank, self.ranks), tensor)
    }
}

/// The rows that a rank makes of samples.
#[derive(Clone, Debug)]
pub(super) struct SampleRows {
    pub warmup: Vec<SequenceWarmup>,
    /// Tokens of a sample.
    pub whole: usize,
    /// A step and its first sample.
    pub next: (usize, u64),
    pub sizes: BatchSizes,
    pub context: ContextPart,
}

impl SampleRows {
    /// The rows of a batch of whole samples, whose first number is `first`; a batch of such rows as it is.
    pub fn of_batch(&self, first: u64, batch: Batch) -> Result<Batch, DataError> {
        let (step, sample) = self.next;
        let step = self.sizes.step_of(step, first - sample);
        let length = row_length(&self.warmup, step, self.whole);
        self.context.of_batch(batch.in_rows_of(length))
    }
}

/// Samples as the batches of a rank.
struct RankSamples {
    samples: Arc<dyn Samples>,
    rows: SampleRows,
}

impl Samples for RankSamples {
    fn seq(&self) -> usize {
        self.samples.seq()
    }

    fn sample(&self, number: u64) -> Result<Sample, DataError> {
        self.samples.sample(number)
    }

    fn batch(&self, numbers: Range<u64>) -> Result<Batch, DataError> {
        self.rows
            .of_batch(numbers.start, self.samples.batch(numbers)?)
    }
}
