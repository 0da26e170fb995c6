//! The batches of a rank, which are read one batch ahead, and the exchange of batch sizes between ranks.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::data::dataset::DatasetError;
use burn_megatron::collective::Comm;
use burn_megatron::comm::CommError;

/// Splits a data loader into parts of consecutive items, one part per rank, like `split_dataloader` of Burn. The
/// numbers of items per part differ by at most 1.
pub(crate) fn split<B>(
    loader: &Arc<dyn DataLoader<B>>,
    ranks: usize,
) -> Vec<Arc<dyn DataLoader<B>>> {
    if ranks == 1 {
        return vec![loader.clone()];
    }
    let items = loader.num_items();
    let start = |rank: usize| items * rank / ranks;
    let part = |rank| loader.slice(start(rank), start(rank + 1));
    (0..ranks).map(part).collect()
}

/// A batch and its number of items.
pub(crate) struct Batch<B> {
    pub input: B,
    pub items: usize,
}

/// The batches of one epoch on one rank. One batch is read ahead to detect the last batch.
pub(crate) struct Batches<'a, B> {
    iterator: Box<dyn DataLoaderIterator<B> + 'a>,
    /// The number of items that were read so far.
    items: usize,
    ahead: Option<Batch<B>>,
}

impl<'a, B> Batches<'a, B> {
    pub fn new(loader: &'a dyn DataLoader<B>) -> Result<Self, DatasetError> {
        let mut batches = Self {
            iterator: loader.iter(),
            items: 0,
            ahead: None,
        };
        batches.advance()?;
        Ok(batches)
    }

    /// Returns the next batch.
    pub fn advance(&mut self) -> Result<Option<Batch<B>>, DatasetError> {
        let ahead = self.iterator.next().transpose()?.map(|input| {
            let before = self.items;
            self.items = self.iterator.progress().items_processed;
            let items = self.items.saturating_sub(before);
            Batch { input, items }
        });
        Ok(std::mem::replace(&mut self.ahead, ahead))
    }

    /// Returns whether [`advance`](Self::advance) will return another batch.
    pub fn has_next(&self) -> bool {
        self.ahead.is_some()
    }
}

/// The message that a rank sends to all other ranks before each micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Announcement {
    /// The weight of the batch, or 0 if the rank has no batch.
    pub weight: u64,
    pub items: u64,
    pub has_batch: bool,
    pub has_next: bool,
    pub stop: bool,
}

/// The combined announcements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Announced {
    /// The weight of this rank's batch divided by the mean weight of all batches. It is 1 if all batches have the same
    /// weight.
    pub share: f64,
    pub items: usize,
    /// Whether any rank has a batch in this micro-batch.
    pub has_batch: bool,
    /// Whether any rank has another batch after this one.
    pub has_next: bool,
    /// Whether any rank requests to stop the training.
    pub stop: bool,
}

impl Announcement {
    /// Exchanges the announcements between all ranks. Collective: call on all ranks.
    pub fn exchange(self, comm: &Comm) -> Result<Announced, CommError> {
        let flags = [self.has_batch, self.has_next, self.stop].map(i64::from);
        let own = [self.weight as i64, self.items as i64];
        let own = [&own[..], &flags[..]].concat();
        let all: Vec<i64> = comm.all_gather(own.into())?.into_vec();
        let sum = |field: usize| -> i64 { all.chunks(5).map(|rank| rank[field]).sum() };
        let (ranks, total) = (comm.size() as f64, sum(0) as f64);
        let share = match total {
            0.0 => 0.0,
            _ => ranks * self.weight as f64 / total,
        };
        Ok(Announced {
            share,
            items: sum(1) as usize,
            has_batch: sum(2) > 0,
            has_next: sum(3) > 0,
            stop: sum(4) > 0,
        })
    }
}
