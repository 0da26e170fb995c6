//! Where the gradients of one rank wait for their reduction.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;

use super::sums::Sums;
use crate::collective::Comm;
use crate::nn::door::{Deferred, DeferringSink, GradientSink, LaterGradient};

/// One slot per parameter of the table: the sum of the gradients of all uses and micro-batches.
pub(super) struct GradientStore {
    slots: Mutex<Vec<Slot>>,
    /// Weight gradients that are put off; none where they are computed at once.
    deferred: Mutex<Option<Vec<Deferred>>>,
    stages: Mutex<Stages>,
    /// The ranks over which gradients are summed.
    comm: Comm,
    /// The ranks (number of dims) of the parameters, to bring gradients into one dimension.
    ranks: Vec<usize>,
}

/// What a parameter has received.
#[derive(Clone, Debug, Default)]
pub(super) struct Slot {
    /// Whether its sum over the ranks is under way.
    pub under_way: bool,
    /// The sum of its gradients, flattened.
    pub sum: Option<Tensor<1>>,
    /// Uses whose backward has not come yet.
    pub expected: usize,
}

/// Which parameters the stages of a pipeline use, and what is under way for them.
#[derive(Default)]
struct Stages {
    current: Option<usize>,
    users: BTreeMap<usize, BTreeSet<usize>>,
    ended: BTreeSet<usize>,
    sums: Vec<Sums>,
}

impl GradientStore {
    pub fn new(ranks: Vec<usize>, comm: &Comm) -> Self {
        Self {
            stages: Mutex::default(),
            comm: comm.clone(),
            slots: Mutex::new(vec![Slot::default(); ranks.len()]),
            deferred: Mutex::new(None),
            ranks,
        }
    }

    /// Empties all slots, and returns what was in them and the sums that are under way.
    pub fn take(&self) -> (Vec<Slot>, Vec<Sums>) {
        let sums = std::mem::take(&mut *lock(&self.stages)).sums;
        let empty = vec![Slot::default(); self.ranks.len()];
        (std::mem::replace(&mut *self.lock(), empty), sums)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        lock(&self.slots)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for GradientStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GradientStore of {} parameters", self.ranks.len())
    }
}

impl GradientSink for GradientStore {
    fn expect(&self, index: usize) {
        let stages = &mut *lock(&self.stages);
        if let Some(stage) = stages.current {
            stages.users.entry(index).or_default().insert(stage);
        }
        self.lock()[index].expected += 1;
    }

    fn accumulate(&self, index: usize, gradient: DispatchTensor) {
        let gradient = flatten(gradient, self.ranks[index]);
        let slot = &mut self.lock()[index];
        if slot.expected == 0 {
            return late(index);
        }
        slot.expected -= 1;
        slot.sum = Some(match slot.sum.take() {
            Some(sum) => sum + gradient,
            None => gradient,
        });
    }

    fn accumulate_later(&self, index: usize, gradient: LaterGradient) {
        // The lock is not held while a gradient is computed.
        if let Some(deferred) = &mut *lock(&self.deferred) {
            deferred.push((index, gradient));
            return;
        }
        // The sum goes into the product, which adds to it in place.
        let sum = {
            let slot = &mut self.lock()[index];
            if slot.expected == 0 {
                return late(index);
            }
            slot.expected -= 1;
            slot.sum.take()
        };
        let sum = flatten(gradient(sum), self.ranks[index]);
        self.lock()[index].sum = Some(sum);
    }
}

impl DeferringSink for GradientStore {
    fn set_deferring(&self, deferring: bool) {
        *lock(&self.deferred) = deferring.then(Vec::new);
    }

    fn take_deferred(&self) -> Vec<Deferred> {
        lock(&self.deferred)
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn begin_stage(&self, stage: usize) {
        lock(&self.stages).current = Some(stage);
    }

    fn end_stage(&self, stage: usize) {
        if self.comm.size() == 1 {
            return;
        }
        let stages = &mut *lock(&self.stages);
        stages.ended.insert(stage);
        let slots = &mut *self.lock();
        let ended = &stages.ended;
        let ready = stages
            .users
            .iter()
            .filter(|(_, users)| users.is_subset(ended));
        let take = |index: &usize| {
            let slot = &mut slots[*index];
            let sum = if slot.expected == 0 {
                slot.sum.take()
            } else {
                None
            };
            slot.under_way |= sum.is_some();
            sum.map(|sum| (*index, sum))
        };
        let sums: Vec<_> = ready.map(|(index, _)| index).filter_map(take).collect();
        if !sums.is_empty() {
            stages.sums.push(Sums::start(sums, &self.comm));
        }
    }
}

fn late(index: usize) {
    tracing::warn!(parameter = index, "a gradient came after its step was over");
}

/// `rank` is the number of dims of the tensor, which a `DispatchTensor` does not carry in its type.
fn flatten(tensor: DispatchTensor, rank: usize) -> Tensor<1> {
    fn of<const D: usize>(tensor: DispatchTensor) -> Tensor<1> {
        let tensor = Tensor::<D>::from_dispatch(tensor);
        let len = tensor.shape().num_elements();
        tensor.reshape([len])
    }
    match rank {
        1 => of::<1>(tensor),
        2 => of::<2>(tensor),
        3 => of::<3>(tensor),
        4 => of::<4>(tensor),
        5 => of::<5>(tensor),
        6 => of::<6>(tensor),
        7 => of::<7>(tensor),
        8 => of::<8>(tensor),
        rank => panic!("Burn has no parameters of {rank} dims"),
    }
}
