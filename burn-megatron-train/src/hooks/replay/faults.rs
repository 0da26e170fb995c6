//! Injects bit flips into the state, for tests.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;

use super::Replay;
use super::flip::flipped;
use crate::Trainer;
use crate::hooks::StepContext;
use burn_megatron::data_parallel::BucketShard;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::OptimizerState;
use burn_megatron_comm_testing::fault_injection::{BitFlip, FaultPlan, FlipTarget};

impl<M: LanguageModel> Trainer<M> {
    /// Injects the bit flips of the plan `faults`. Give the communicators the same plan: they set its
    /// current step.
    pub fn inject(&mut self, faults: Arc<FaultPlan>) {
        if self.hooks.get::<Replay>().is_none() {
            self.hooks.add(Some(Replay::default()));
        }
        if let Some(replay) = self.hooks.get_mut::<Replay>() {
            replay.faults = Some(faults);
        }
    }
}

impl Replay {
    pub(super) fn flip_weights<M: LanguageModel>(&self, context: &mut StepContext<'_, M>) {
        let slices = context.ddp.shards().iter().map(|shard| shard.slices.len());
        for (number, flip) in self.flips(context, FlipTarget::Weight, slices.sum()) {
            let (bucket, at) = slice_of(context.ddp.shards(), number as usize);
            let range = context.ddp.shards()[bucket].slices[at].local_range.clone();
            context
                .ddp
                .change_master(bucket, |master| flip_in(master, range, flip));
        }
    }

    pub(super) fn flip_optimizer_state<M: LanguageModel>(&self, context: &mut StepContext<'_, M>) {
        let slices = context.ddp.shards().iter().map(|shard| shard.slices.len());
        let slices: usize = slices.sum();
        let dtypes: Vec<_> = context.ddp.master_dtypes().collect();
        let kinds = context.optimizer.kinds(&dtypes).len();
        for (number, flip) in self.flips(context, FlipTarget::Optimizer, kinds * slices) {
            let (kind, number) = (number as usize / slices, number as usize % slices);
            let (bucket, at) = slice_of(context.ddp.shards(), number);
            let shard: BucketShard = context.ddp.shards()[bucket].clone();
            let mut tensors = context.optimizer.tensors(bucket, &shard);
            let range = shard.slices[at].local_range.clone();
            tensors[kind] = flip_in(tensors[kind].clone(), range, flip);
            let taken = context.position.count.taken;
            context.optimizer.restore(bucket, &shard, tensors, taken);
        }
    }

    fn flips<M: LanguageModel>(
        &self,
        context: &StepContext<'_, M>,
        target: FlipTarget,
        tensors: usize,
    ) -> Vec<(u64, BitFlip)> {
        let rank = context.groups().rank();
        let Some(faults) = &self.faults else {
            return vec![];
        };
        let flips = faults.of_state(rank, target, tensors as u64);
        for (number, flip) in &flips {
            tracing::warn!("{flip} triggers on rank {rank}, tensor {number}");
        }
        flips
    }
}

/// Returns the index of the bucket that holds a slice of a parameter, and the offset of the slice there.
fn slice_of(shards: &[BucketShard], number: usize) -> (usize, usize) {
    let mut left = number;
    for (bucket, shard) in shards.iter().enumerate() {
        match left.checked_sub(shard.slices.len()) {
            None => return (bucket, left),
            Some(rest) => left = rest,
        }
    }
    unreachable!("the plan is asked for the slices that there are")
}

/// Flips a bit in a range of elements.
fn flip_in(x: Tensor<1>, range: Range<usize>, flip: BitFlip) -> Tensor<1> {
    let changed = flipped(x.clone().slice([range.clone()]), flip);
    x.slice_assign([range], changed)
}
