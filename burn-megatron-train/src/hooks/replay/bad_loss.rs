//! Finds the cause of an invalid loss. The step is computed again on the same rank, and then on another rank of the
//! data axis.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::{Replay, ReplayError, Verdict, gather};
use crate::TrainError;
use crate::hooks::{RemainingHooks, StepContext, StepDecision, StepInput};
use burn_megatron::fingerprint::{Event, Site, folded, of_tensor};
use burn_megatron::mesh::{Axis, Coordinates, ExpertCoordinates, Grid, Mesh};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::fp8::Fp8Snapshot;
use burn_megatron_data::{Batch, DataError};

/// A step with a bad loss.
pub(super) struct BadLoss<'a> {
    pub decision: &'a StepDecision<'a>,
    /// The state of the FP8 layers before the step.
    pub fp8: &'a Fp8Snapshot,
    /// The fault, as text of the report: `the loss is not finite`.
    pub what: &'static str,
}

/// Returns the fault of a step, unless a dynamic loss scale explains it.
pub(super) fn fault<M: LanguageModel>(
    decision: &StepDecision<'_>,
    context: &StepContext<'_, M>,
) -> Option<&'static str> {
    let reading = decision.reading(context);
    if decision.skip.is_some() {
        return Some("the loss or the norm of the gradients is a spike");
    }
    let is_bad = !reading.is_taken() && !reading.is_without_targets();
    (is_bad && context.scaler.state().is_none()).then_some("the loss or a gradient is not finite")
}

impl BadLoss<'_> {
    fn error(&self, verdict: Verdict, message: &str) -> TrainError {
        let message = format!("{}: {message}", self.what);
        let step = self.decision.input.step + 1;
        ReplayError {
            step,
            verdict,
            message,
        }
        .into()
    }
}

/// The fingerprints of the results that a rank computes from some samples, before the reduction over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OfSamples {
    losses: u64,
    gradients: u64,
}

impl OfSamples {
    fn of(events: &[Event]) -> Self {
        let all = |is_one: fn(&Site) -> bool| {
            let events = events.iter().filter(|event| is_one(&event.site));
            folded(events.flat_map(|event| event.outputs.iter().copied()))
        };
        Self {
            losses: all(|site| matches!(site, Site::Losses)),
            gradients: all(|site| matches!(site, Site::Gradient { .. })),
        }
    }
}

impl Replay {
    /// Computes a step with a bad loss again: first on this rank, then its batches on another rank of the data axis.
    /// Collective: call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks, if a repeated computation has a different result.
    pub(super) fn examine<M: LanguageModel>(
        &mut self,
        context: &mut StepContext<'_, M>,
        bad: &BadLoss<'_>,
        next: &mut RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        let after = context.ddp.fp8().snapshot();
        let own = self.compute_again(context, bad, next)?;
        let shift = shift(context.groups().mesh());
        if let Some(shift) = shift {
            self.compute_elsewhere(context, bad, (own, shift), next)?;
            self.is_bad_elsewhere = true;
        }
        context.ddp.fp8().restore(&after);
        let groups = context.groups();
        if groups.rank() == 0 {
            let (step, what) = (bad.decision.input.step + 1, bad.what);
            let only = match groups.data().size() {
                1 => "data-parallel rank",
                _ => "replica of the experts",
            };
            match shift {
                None => tracing::warn!(
                    step,
                    "{what}: the same when computed again; it was not computed on another device, because the layout \
                     has one {only}"
                ),
                Some(_) => tracing::warn!(
                    step,
                    "{what}: the same when computed again, and on another data-parallel rank: it is due to the data, the \
                     settings or the software"
                ),
            }
        }
        Ok(())
    }

    /// Returns an error if a second run on the same ranks has different losses or gradients.
    fn compute_again<M: LanguageModel>(
        &mut self,
        context: &mut StepContext<'_, M>,
        bad: &BadLoss<'_>,
        next: &mut RemainingHooks<'_, M>,
    ) -> Result<OfSamples, TrainError> {
        context.ddp.fp8().restore(bad.fp8);
        let (run, events) = self.observed_run(context, bad.decision.input, next, true)?;
        let pairs = [
            (
                "losses",
                of_all(bad.decision.losses.iter()),
                of_all(run.losses.losses.iter()),
            ),
            (
                "gradients",
                of_all(bad.decision.gradients.sums()),
                of_all(run.gradients.sums()),
            ),
        ];
        for (what, before, now) in pairs {
            let own = context.groups().rank();
            let all: Vec<Option<usize>> =
                gather(&(before != now).then_some(own), context.groups())?;
            let ranks: Vec<_> = all.into_iter().flatten().map(|it| it.to_string()).collect();
            if !ranks.is_empty() {
                let word = if ranks.len() == 1 { "rank" } else { "ranks" };
                let ranks = ranks.join(", ");
                let message = format!(
                    "computed again from the same state, the {what} differ on {word} {ranks}"
                );
                return Err(bad.error(Verdict::Transient, &message));
            }
        }
        Ok(OfSamples::of(&events))
    }

    /// Returns an error if the samples of a rank have different losses or gradients on the rank that is `shift`
    /// data-parallel ranks before it. `own` holds the fingerprints of this rank's samples, computed on this rank.
    fn compute_elsewhere<M: LanguageModel>(
        &mut self,
        context: &mut StepContext<'_, M>,
        bad: &BadLoss<'_>,
        (own, shift): (OfSamples, usize),
        next: &mut RemainingHooks<'_, M>,
    ) -> Result<(), TrainError> {
        let data = context.groups().data().clone();
        let (rank, ranks) = (data.rank(), data.size());
        let (from, to) = ((rank + shift) % ranks, (rank + ranks - shift) % ranks);
        let batches = batches_of(context, bad.decision, from)?;
        let input = StepInput {
            batches: &batches,
            data_rank: from,
            ..bad.decision.input.clone()
        };
        context.ddp.fp8().restore(bad.fp8);
        let (_, events) = self.observed_run(context, &input, next, true)?;
        let OfSamples { losses, gradients } = OfSamples::of(&events);
        // Each rank has computed the samples of another rank.
        let found = vec![losses as i64, gradients as i64];
        let all: Vec<i64> = data.all_gather(found.into())?.into_vec();
        let there = &all[2 * to..2 * to + 2];
        let what = match own {
            own if own.losses != there[0] as u64 => Some("losses"),
            own if own.gradients != there[1] as u64 => Some("gradients"),
            _ => None,
        };
        let (own, there) = (context.groups().rank(), data.group().ranks()[to]);
        let other = what.map(|what| {
            format!("rank {there} has different {what} than rank {own} for the same samples")
        });
        let all: Vec<Option<String>> = gather(&other, context.groups())?;
        let others: Vec<_> = all.into_iter().flatten().collect();
        if others.is_empty() {
            return Ok(());
        }
        let message = format!("which a second run repeats; {}", others.join("; "));
        Err(bad.error(Verdict::Device, &message))
    }
}

/// Returns the micro-batches of a rank of the data axis in the step that runs.
fn batches_of<M: LanguageModel>(
    context: &StepContext<'_, M>,
    decision: &StepDecision<'_>,
    data_rank: usize,
) -> Result<Vec<Batch>, DataError> {
    let (plan, step) = (&context.plan, decision.input.step);
    let before = context.position.samples - plan.samples_in(step..step + 1);
    plan.batches((step, before), data_rank, decision.samples)
}

/// Returns the offset in data-parallel ranks that moves samples to other devices with the same weights. The ranks of a
/// replica of the experts move together. Returns `None` if there is no other replica.
fn shift(mesh: &Mesh) -> Option<usize> {
    let data = mesh.size(Grid::Dense, Axis::Data);
    let moved = |rank: usize, by: usize| {
        let own = mesh.coordinates(rank);
        let data = (own.data + by) % data;
        mesh.rank_at(Coordinates { data, ..own })
    };
    (1..data).find(|by| {
        let mut replicas = BTreeMap::new();
        (0..mesh.world_size()).all(|rank| {
            let own = mesh.expert_coordinates(rank);
            let there = mesh.expert_coordinates(moved(rank, *by));
            let replica = *replicas.entry(own.expert_data).or_insert(there.expert_data);
            replica != own.expert_data
                && there
                    == ExpertCoordinates {
                        expert_data: replica,
                        ..own
                    }
        })
    })
}

fn of_all<'a>(tensors: impl Iterator<Item = &'a Tensor<1>>) -> u64 {
    folded(tensors.map(|tensor| of_tensor(tensor.clone())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::mesh::ParallelConfig;

    #[test]
    fn samples_move_to_another_replica_of_all_that_computes_them() {
        let dense = ParallelConfig::new;
        for (layout, expected) in [
            (dense().with_data(1), None),
            (dense().with_tensor(2).with_data(3), Some(1)),
            (dense().with_context(2).with_data(2), Some(1)),
            (dense().with_data(2).with_expert(2), None),
            (dense().with_data(4).with_expert(2), Some(2)),
            (
                dense().with_data(8).with_expert(2).with_pipeline(2),
                Some(2),
            ),
            (
                dense()
                    .with_tensor(2)
                    .with_data(4)
                    .with_expert(2)
                    .with_expert_tensor(1),
                Some(1),
            ),
            (
                dense()
                    .with_tensor(2)
                    .with_data(4)
                    .with_expert(4)
                    .with_expert_tensor(1),
                Some(2),
            ),
            (dense().with_context(2).with_data(4).with_expert(4), Some(2)),
        ] {
            let mesh = Mesh::new(&layout, layout.world_size().unwrap()).unwrap();
            assert_eq!(shift(&mesh), expected, "{layout:?}");
        }
    }
}
