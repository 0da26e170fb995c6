//! Checks weights and optimizer state between steps by their fingerprints.

use std::collections::HashMap;
use std::time::Instant;

use burn::tensor::Tensor;
use xxhash_rust::xxh3::xxh3_64;

use super::{Replay, ReplayError, Verdict, gather, replicas};
use crate::TrainError;
use crate::hooks::StepContext;
use burn_megatron::comm::CommError;
use burn_megatron::data_parallel::layout::ParameterSlice;
use burn_megatron::fingerprint::of_tensor;
use burn_megatron::model::LanguageModel;
use burn_megatron::optim::{OptimizerState, all_finite};

/// A part of the state of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum StatePart {
    /// This rank's shard of a parameter.
    Weight(usize),
    /// A tensor of the optimizer state, with its kind.
    Optimizer(usize, usize),
    /// A parameter in the compute type of the model, gathered from all ranks.
    Copy(usize),
    /// A parameter that is not trained.
    Frozen(usize),
    /// A bias of an expert router.
    Bias(String),
    /// The scales of an FP8 layer.
    Scales(String),
}

/// The fingerprints of the state of a rank.
pub(super) struct StateFingerprints(Vec<(StatePart, u64)>);

impl Replay {
    /// Takes the fingerprints of the state before the first step, and injects the bit flips of the plan.
    pub(super) fn begin_state<M: LanguageModel>(&mut self, context: &mut StepContext<'_, M>) {
        if self.state.is_none() {
            self.end_state(context);
        }
        if self.faults.is_some() {
            self.flip_weights(context);
            self.flip_optimizer_state(context);
        }
    }

    /// Takes the fingerprints of the state after a step, to compare them in the next step.
    pub(super) fn end_state<M: LanguageModel>(&mut self, context: &StepContext<'_, M>) {
        if self.checks() {
            let began = Instant::now();
            self.state = Some(StateFingerprints(fingerprints(context)));
            self.cost.state.seconds += began.elapsed().as_secs_f64();
        }
    }

    /// Checks, before the optimizer step, that the state is unchanged since the last step, and equal on ranks that hold
    /// the same state. Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks if the state differs.
    pub(super) fn check_state<M: LanguageModel>(
        &mut self,
        context: &StepContext<'_, M>,
        step: usize,
    ) -> Result<(), TrainError> {
        let Some(StateFingerprints(before)) = self.state.take() else {
            return Ok(());
        };
        let began = Instant::now();
        let now = fingerprints(context);
        // Parameters that were still being gathered after the step have no fingerprint.
        let known: HashMap<_, _> = before.iter().map(|(part, sum)| (part, sum)).collect();
        let is_changed =
            |(part, sum): &&(StatePart, u64)| known.get(part).is_some_and(|before| *before != sum);
        let changes = now.iter().filter(is_changed);
        let changes: Vec<_> = changes.map(|(part, _)| describe(context, part)).collect();
        let others = other_replicas(context, &now)?;
        self.state = Some(StateFingerprints(before));
        let is_good = all_finite(changes.is_empty() && others.is_empty(), context.groups())?;
        self.cost.state.add(began);
        if is_good {
            return Ok(());
        }
        let all: Vec<(Vec<String>, Vec<String>)> = gather(&(changes, others), context.groups())?;
        let (changes, others): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        let of_rank = |(rank, changes): (usize, Vec<String>)| {
            (!changes.is_empty()).then(|| format!("on rank {rank} {}", changes.join(", ")))
        };
        let mut ranks: Vec<_> = changes
            .into_iter()
            .enumerate()
            .filter_map(of_rank)
            .collect();
        if ranks.is_empty() {
            // Replicas of a changed part differ too.
            ranks = others.concat();
        }
        Err(ReplayError {
            step,
            verdict: Verdict::StateChanged,
            message: ranks.join("; "),
        }
        .into())
    }
}

/// Returns the tensors that differ between replicas. Only the first rank of each group reports. Collective: call on
/// all ranks of the world.
fn other_replicas<M: LanguageModel>(
    context: &StepContext<'_, M>,
    now: &[(StatePart, u64)],
) -> Result<Vec<String>, CommError> {
    let entries = context.ddp.table().entries();
    let mut found = vec![];
    for (grid, groups) in context.ddp.sharding_groups() {
        let is_of_grid = |part: &StatePart| match part {
            StatePart::Weight(index) | StatePart::Copy(index) => entries[*index].grid == grid,
            _ => false,
        };
        let own: Vec<_> = now.iter().filter(|(part, _)| is_of_grid(part)).collect();
        let (copies, weights): (Vec<_>, Vec<_>) = own
            .into_iter()
            .partition(|(part, _)| matches!(part, StatePart::Copy(_)));
        // Copies are equal on all data-parallel ranks. Master weights are equal on ranks with the same shard.
        for (parts, comm) in [(copies, &groups.data), (weights, &groups.replicas)] {
            let sums: Vec<_> = parts.iter().map(|(_, sum)| *sum).collect();
            if let Some((number, ranks)) = replicas::differing(&sums, comm)? {
                let part = describe(context, &parts[number].0);
                found.push(ranks.describe(&part));
            }
        }
    }
    Ok(found)
}

fn describe<M: LanguageModel>(context: &StepContext<'_, M>, part: &StatePart) -> String {
    let path = |index: usize| &context.ddp.table().entries()[index].path;
    match part {
        StatePart::Weight(index) => format!("the weights of {}", path(*index)),
        StatePart::Optimizer(kind, index) => {
            let dtypes: Vec<_> = context.ddp.master_dtypes().collect();
            let kinds = context.optimizer.kinds(&dtypes);
            format!("{}{}", kinds[*kind].prefix, path(*index))
        }
        StatePart::Copy(index) => {
            format!("the copy of {} that the model computes with", path(*index))
        }
        StatePart::Frozen(index) => {
            let frozen = context.ddp.frozen_table().map(|table| table.entries());
            let path = frozen.and_then(|entries| Some(&entries.get(*index)?.path[..]));
            format!("the frozen weights of {}", path.unwrap_or("a parameter"))
        }
        StatePart::Bias(path) => path.clone(),
        StatePart::Scales(path) => format!("the scales of {path}"),
    }
}

fn fingerprints<M: LanguageModel>(context: &StepContext<'_, M>) -> Vec<(StatePart, u64)> {
    let mut all = vec![];
    for (bucket, shard) in context.ddp.shards().iter().enumerate() {
        let part = |x: &Tensor<1>, at: usize| {
            of_tensor(x.clone().slice([shard.slices[at].local_range.clone()]))
        };
        let master = context.ddp.master_shard(bucket);
        let numbered = || shard.slices.iter().enumerate();
        all.extend(
            numbered().map(|(at, slice)| (StatePart::Weight(slice.index), part(&master, at))),
        );
        drop(master);
        let tensors = context.optimizer.tensors(bucket, shard);
        for (kind, tensor) in tensors.into_iter().enumerate() {
            let of = |slice: usize| StatePart::Optimizer(kind, slice);
            all.extend(numbered().map(|(at, slice)| (of(slice.index), part(&tensor, at))));
        }
    }
    let copies = context.ddp.model_copies();
    all.extend(copies.map(|(index, x)| (StatePart::Copy(index), of_tensor(x))));
    for (shard, x) in context.ddp.frozen_shards() {
        let part = |slice: &ParameterSlice| {
            let sum = of_tensor(x.clone().slice([slice.local_range.clone()]));
            (StatePart::Frozen(slice.index), sum)
        };
        all.extend(shard.slices.iter().map(part));
    }
    let biases = context.ddp.routers().expert_biases().into_iter();
    all.extend(biases.map(|(path, bias)| (StatePart::Bias(path), of_tensor(bias.value()))));
    let scales = context.ddp.fp8().states().into_iter();
    all.extend(scales.map(|(path, state)| {
        let state = format!("{state:?}");
        (StatePart::Scales(path), xxh3_64(state.as_bytes()))
    }));
    all
}
