//! Tells what a bad loss is due to: it is computed again here, and then on another rank of the data axis.

use std::collections::BTreeMap;

use burn::tensor::Tensor;

use super::super::{TrainError, Trainer, Verdict};
use super::{ReplayError, StepInput};
use burn_megatron::data_parallel::Gradients;
use burn_megatron::fingerprint::{Event, Site, folded, of_tensor};
use burn_megatron::mesh::{Axis, Coordinates, ExpertCoordinates, Grid, Mesh};
use burn_megatron::model::LanguageModel;
use burn_megatron::nn::fp8::Fp8Snapshot;
use burn_megatron_data::{Batch, Samples};

/// The facts about a step with a bad loss.
pub(crate) struct BadLoss<'a> {
    pub input: &'a StepInput<'a>,
    pub losses: &'a [Tensor<1>],
    pub gradients: &'a Gradients,
    /// The 8-bit layers before the step.
    pub fp8: &'a Fp8Snapshot,
    /// The fault, for the report: `the loss is not finite`.
    pub what: &'static str,
}

impl BadLoss<'_> {
    fn error(&self, verdict: Verdict, message: &str) -> TrainError {
        let message = format!("{}: {message}", self.what);
        let step = self.input.step + 1;
        ReplayError {
            step,
            verdict,
            message,
        }
        .into()
    }
}

/// The fingerprints of what a rank computes of some samples, before it is summed over ranks.
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

impl<M: LanguageModel> Trainer<M> {
    /// Computes a step with a bad loss again, on this rank, and its batches on another rank of the data axis. Collective:
    /// call on all ranks of the world.
    ///
    /// # Errors
    ///
    /// [`TrainError::Replay`] on all ranks, if another result was computed here or there.
    pub(crate) fn examine(
        &mut self,
        bad: &BadLoss<'_>,
        samples: &dyn Samples,
    ) -> Result<(), TrainError> {
        let after = self.ddp.fp8().snapshot();
        let own = self.compute_again(bad)?;
        let shift = shift(self.ddp.groups().mesh());
        if let Some(shift) = shift {
            self.compute_elsewhere(bad, own, shift, samples)?;
            self.replay.is_bad_elsewhere = true;
        }
        self.ddp.fp8().restore(&after);
        let groups = self.ddp.groups();
        if groups.rank() == 0 {
            let (step, what) = (bad.input.step + 1, bad.what);
            match shift {
                None if groups.data().size() == 1 => tracing::warn!(
                    step,
                    "{what}: the same when computed again; it was not computed on another device, as the layout has one \
                     data-parallel rank"
                ),
                None => tracing::warn!(
                    step,
                    "{what}: the same when computed again; it was not computed on another device, as the layout has one \
                     replica of the experts"
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

    /// Fails if a second run on the same ranks has other losses or gradients.
    fn compute_again(&mut self, bad: &BadLoss<'_>) -> Result<OfSamples, TrainError> {
        self.ddp.fp8().restore(bad.fp8);
        let (run, events) = self.observed_run(bad.input, true)?;
        let pairs = [
            (
                "losses",
                of_all(bad.losses.iter()),
                of_all(run.losses.losses.iter()),
            ),
            (
                "gradients",
                of_all(bad.gradients.sums()),
                of_all(run.gradients.sums()),
            ),
        ];
        for (what, before, now) in pairs {
            let own = self.ddp.groups().rank();
            let all: Vec<Option<usize>> = self.gather(&(before != now).then_some(own))?;
            let ranks: Vec<_> = all.into_iter().flatten().map(|it| it.to_string()).collect();
            if !ranks.is_empty() {
                let word = if ranks.len() == 1 { "rank" } else { "ranks" };
                let ranks = ranks.join(", ");
                let message = format!(
                    "computed again from one state, the {what} are others on {word} {ranks}"
                );
                return Err(bad.error(Verdict::Transient, &message));
            }
        }
        Ok(OfSamples::of(&events))
    }

    /// Fails if the samples of a rank have other losses or gradients `shift` data-parallel ranks before it. `own` are those
    /// of this rank's samples here.
    fn compute_elsewhere(
        &mut self,
        bad: &BadLoss<'_>,
        own: OfSamples,
        shift: usize,
        samples: &dyn Samples,
    ) -> Result<(), TrainError> {
        let data = self.ddp.groups().data().clone();
        let (rank, ranks) = (data.rank(), data.size());
        let (from, to) = ((rank + shift) % ranks, (rank + ranks - shift) % ranks);
        let batches = self.batches_of(bad.input.step, from, samples)?;
        let input = StepInput {
            batches: &batches,
            data_rank: from,
            ..bad.input.clone()
        };
        self.ddp.fp8().restore(bad.fp8);
        let (_, events) = self.observed_run(&input, true)?;
        let OfSamples { losses, gradients } = OfSamples::of(&events);
        // Each rank has computed those of another one.
        let found = vec![losses as i64, gradients as i64];
        let all: Vec<i64> = data.all_gather(found.into())?.into_vec();
        let there = &all[2 * to..2 * to + 2];
        let what = match own {
            own if own.losses != there[0] as u64 => Some("losses"),
            own if own.gradients != there[1] as u64 => Some("gradients"),
            _ => None,
        };
        let (own, there) = (self.ddp.groups().rank(), data.group().ranks()[to]);
        let other = what
            .map(|what| format!("rank {there} has other {what} than rank {own} of its samples"));
        let all: Vec<Option<String>> = self.gather(&other)?;
        let others: Vec<_> = all.into_iter().flatten().collect();
        if others.is_empty() {
            return Ok(());
        }
        let message = format!("which a second run repeats; {}", others.join("; "));
        Err(bad.error(Verdict::Device, &message))
    }

    /// The micro-batches of a rank of the data axis in the step that runs.
    fn batches_of(
        &self,
        step: usize,
        data_rank: usize,
        samples: &dyn Samples,
    ) -> Result<Vec<Batch>, TrainError> {
        let before = self.samples - self.sizes().of(step) as u64;
        Ok(self.batches_from((step, before), data_rank, samples)?)
    }
}

/// By how many ranks of the data axis samples move, so that all they are computed on are other devices, which have the same
/// parts of the weights: the ranks of one replica of the experts move together. `None` where there is no other replica.
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
