//! Assigns samples to the steps and the micro-batches of a rank.

use std::ops::{Add, Range};
use std::sync::Arc;

use super::ContextPart;
use crate::TrainConfig;
use crate::hooks::{BatchSizes, BatchWarmup, SequenceWarmup, row_length};
use burn_megatron::data_parallel::DistributedDataParallel;
use burn_megatron::model::LanguageModel;
use burn_megatron_data::{Batch, DataError, Padding, Samples};

/// A function that divides the samples of a complete step into the micro-batches of this rank.
pub type SplitStep = Arc<dyn Fn(&Batch) -> Result<Vec<Batch>, DataError> + Send + Sync>;

/// The sample numbers of micro-batches.
pub(super) type SampleNumbers = Box<dyn Iterator<Item = Range<u64>> + Send>;

/// The plan that assigns the samples of a run to steps and to the micro-batches of a rank.
#[derive(Clone)]
pub struct BatchPlan {
    sizes: BatchSizes,
    micro_batch_size: usize,
    rows: Vec<SequenceWarmup>,
    /// The number of tokens per sample.
    whole: usize,
    context: ContextPart,
    /// The index of this rank on the data axis.
    data_rank: usize,
    data_ranks: usize,
    split: Option<SplitStep>,
}

impl BatchPlan {
    pub(crate) fn new<M: LanguageModel>(
        config: &TrainConfig,
        ddp: &DistributedDataParallel<M>,
    ) -> Self {
        let (data, model) = (ddp.groups().data(), ddp.module());
        Self {
            sizes: BatchSizes::new(vec![], config.global_batch_size),
            micro_batch_size: config.micro_batch_size,
            rows: vec![],
            whole: config.sequence_length.unwrap_or(model.context()),
            context: ContextPart::of(ddp.groups(), model.further_depths()),
            data_rank: data.rank(),
            data_ranks: data.size(),
            split: None,
        }
    }

    /// Sets the batch size warm-up: smaller batches of increasing size in the first steps.
    pub fn warm_up_batches(&mut self, parts: Vec<BatchWarmup>) {
        self.sizes = BatchSizes::new(parts, self.sizes.whole());
    }

    /// Sets the sequence length warm-up: shorter sequences of increasing length in the first steps.
    pub fn warm_up_rows(&mut self, parts: Vec<SequenceWarmup>) {
        self.rows = parts;
    }

    /// Sets a function that divides the samples of a complete step into the micro-batches of this rank. Every rank then
    /// reads all samples of a step. `split` must return the same number of micro-batches on all ranks.
    pub fn split_steps(&mut self, split: SplitStep) {
        self.split = Some(split);
        // Documents are cut only after all rows of a step are read.
        self.context = self.context.of_one_rank();
    }

    /// Returns the number of samples in the given steps, summed over all ranks.
    pub fn samples_in(&self, steps: Range<usize>) -> u64 {
        self.sizes.sum(steps)
    }

    /// Returns the sequence length in a step, in tokens. It is shorter than a sample during the sequence length
    /// warm-up.
    pub fn row_length(&self, step: usize) -> usize {
        row_length(&self.rows, step, self.whole)
    }

    /// Returns the number of tokens per sample.
    pub fn sample_length(&self) -> usize {
        self.whole
    }

    /// Returns whether every rank reads all rows of a step.
    pub(crate) fn splits_steps(&self) -> bool {
        self.split.is_some()
    }

    /// Returns the global index of the first micro-batch of a rank of the data axis in a step.
    pub(crate) fn first_micro_batch(&self, step: usize, data_rank: usize) -> usize {
        self.samples_of(step, data_rank).start / self.micro_batch_size
    }

    /// Returns the number of micro-batches of this rank in a step, if steps are not split.
    pub(super) fn micro_batches(&self, step: usize) -> usize {
        let samples = self.samples_of(step, self.data_rank).len();
        samples.div_ceil(self.micro_batch_size)
    }

    /// Returns the indices of the samples of a step on a rank of the data axis.
    fn samples_of(&self, step: usize, data_rank: usize) -> Range<usize> {
        share_of(self.sizes.of(step), data_rank, self.data_ranks)
    }

    /// Returns the batches of this rank in a step. `next` is the step and the number of samples before it.
    pub(crate) fn own_batches(
        &self,
        next: (usize, u64),
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, DataError> {
        self.batches(next, self.data_rank, samples)
    }

    /// Returns the batches of a rank of the data axis in a step. `before` is the number of samples before the step.
    pub(crate) fn batches(
        &self,
        (step, before): (usize, u64),
        data_rank: usize,
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, DataError> {
        let mut numbers = self.numbers(step..step + 1, before, data_rank);
        let rows = |numbers| self.rows_of((step, before), numbers, samples);
        match &self.split {
            Some(split) => split(&rows(numbers.next().unwrap_or(before..before))?),
            None => numbers.map(rows).collect(),
        }
    }

    /// Returns the rows of the samples `numbers` on this rank. `before` is the number of samples before the step.
    pub(super) fn rows_of(
        &self,
        (step, before): (usize, u64),
        numbers: Range<u64>,
        samples: &dyn Samples,
    ) -> Result<Batch, DataError> {
        let step = self.sizes.step_of(step, numbers.start - before);
        let rows = samples.batch(numbers)?.in_rows_of(self.row_length(step));
        self.context.of_batch(rows)
    }

    /// Returns the padding of micro-batches that this rank counts. Ranks that share documents have the same padding, so
    /// only their first rank counts it. Without shared documents, all ranks of a context axis count the same padding.
    pub(crate) fn padding(&self, batches: &[Batch]) -> Padding {
        let is_counted = |batch: &&Batch| {
            let shard = batch.shard.as_ref();
            self.split.is_none() || shard.is_none_or(|shard| shard.rank() == 0)
        };
        let counted = batches.iter().filter(is_counted).map(Batch::padding);
        counted.fold(Padding::default(), Padding::add)
    }

    /// Returns the sample numbers of each micro-batch of this rank: see [`numbers`](Self::numbers).
    pub(super) fn own_numbers(&self, steps: Range<usize>, before: u64) -> SampleNumbers {
        self.numbers(steps, before, self.data_rank)
    }

    /// Returns the sample numbers of each micro-batch of a rank of the data axis in the given steps. `before` is the
    /// number of samples before the steps. If steps are split, returns the sample numbers of each step, which every
    /// rank reads.
    fn numbers(&self, steps: Range<usize>, before: u64, rank: usize) -> SampleNumbers {
        let (sizes, size) = (self.sizes.clone(), self.micro_batch_size);
        let (first, ranks) = (steps.start, self.data_ranks);
        if self.splits_steps() {
            return Box::new(steps.map(move |step| {
                let start = before + sizes.sum(first..step);
                start..start + sizes.of(step) as u64
            }));
        }
        let starts = steps.flat_map(move |step| {
            let before = before + sizes.sum(first..step);
            let own = share_of(sizes.of(step), rank, ranks);
            own.step_by(size).map(move |start| before + start as u64)
        });
        Box::new(starts.map(move |start| start..start + size as u64))
    }
}

/// Returns the sample indices of a rank of the data axis in a step of `samples` samples.
fn share_of(samples: usize, rank: usize, ranks: usize) -> Range<usize> {
    let share = samples / ranks;
    rank * share..(rank + 1) * share
}
