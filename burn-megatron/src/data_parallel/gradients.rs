//! The gradients of one step, reduced and ready for the optimizer.

use std::collections::BTreeMap;

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::counted::{Chosen, Stretch, held_together, whole_where};
use super::guard::Culprit;
use super::plan::Plan;
use super::sums::Sums;
use super::usage::Flat;
use crate::collective::Comm;
use crate::comm::{CommError, Groups};
use crate::nn::{ParameterTable, Placement};

/// What this rank steps of each bucket of gradients.
///
/// It is kept as a sum over all tokens and one factor for all parameters, so that dividing,
/// unscaling and clipping cost nothing before the optimizer reads the sums.
#[derive(Debug)]
pub struct Gradients {
    shards: Vec<Flat>,
    factor: f64,
    /// The tokens of all micro-batches on all ranks, by which the gradients are divided.
    pub tokens: u64,
    /// What was found on this rank before the gradients were summed.
    pub culprits: Vec<Culprit>,
}

impl Gradients {
    pub(super) fn new(shards: Vec<Flat>, tokens: u64, culprits: Vec<Culprit>) -> Self {
        Self {
            shards,
            factor: 1.0 / tokens.max(1) as f64,
            tokens,
            culprits,
        }
    }

    /// What is to be multiplied with [`factor`](Self::factor): this rank's part of each bucket, as
    /// a sum over all tokens.
    pub fn sums(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.shards.iter().map(|shard| &shard.tensor)
    }

    /// What the sums are to be multiplied with.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// The sums, for the optimizer, which may write over them.
    pub(crate) fn into_sums(self) -> impl Iterator<Item = Flat> {
        self.shards.into_iter()
    }

    /// Multiplies every gradient.
    pub fn scale(&mut self, factor: f64) {
        self.factor *= factor;
    }
}

/// Sums over the model's ranks what is a part of a sum there.
#[derive(Debug)]
pub(super) struct ModelSums {
    /// Sums over the tensor axis, between the ends of the pipeline, and over neighbours on the
    /// tensor axis, in this order on every rank.
    sums: Vec<(Comm, Vec<Stretch>)>,
}

impl ModelSums {
    /// Forms the groups that `table` calls for; every rank of the tensor axis must come.
    pub fn new(plan: &Plan, table: &ParameterTable, groups: &Groups) -> Result<Self, CommError> {
        let place = groups.place();
        let partial = whole_where(plan, table, |entry| entry.partial_gradient);
        let at_both_ends = whole_where(plan, table, |entry| entry.at_both_ends);
        let mut sums = vec![
            (groups.tensor().clone(), partial),
            (groups.ends().clone(), at_both_ends),
        ];
        for (replicas, comm) in neighbours(table, groups)? {
            sums.push((comm, held_together(plan, table, place, replicas)));
        }
        sums.retain(|(comm, stretches)| comm.size() > 1 && !stretches.is_empty());
        Ok(Self { sums })
    }

    /// Replaces each part by the sum.
    pub fn apply(&self, shards: &mut [Flat]) {
        for (comm, stretches) in &self.sums {
            let part = |(number, stretch): (usize, &Stretch)| {
                let whole = shards[stretch.bucket].tensor.clone();
                (number, whole.slice([stretch.range.clone()]))
            };
            let parts = stretches.iter().enumerate().map(part).collect();
            Sums::start(parts, comm).finish(|number, sum| {
                let stretch = &stretches[number];
                stretch.put(&mut shards[stretch.bucket], sum);
            });
        }
    }
}

impl Stretch {
    /// Writes over the chosen elements of this stretch.
    fn put(&self, shard: &mut Flat, values: Tensor<1>) {
        let nothing = Tensor::empty([0], (&values.device(), values.dtype()));
        let whole = std::mem::replace(&mut shard.tensor, nothing);
        let values = match &self.chosen {
            Chosen::Some(mask) => {
                let own = whole.clone().slice([self.range.clone()]);
                own.mask_where(mask.clone(), values)
            }
            Chosen::All | Chosen::None => values,
        };
        shard.tensor = flat::accumulate(whole, self.range.start, values, false);
    }
}

/// The groups of ranks that hold the same sections, by their number of ranks.
pub(super) fn neighbours(
    table: &ParameterTable,
    groups: &Groups,
) -> Result<BTreeMap<usize, Comm>, CommError> {
    let ranks = groups.place().size;
    let mut sizes: Vec<usize> = table
        .entries()
        .iter()
        .flat_map(|entry| match &entry.placement {
            Placement::Replicated => vec![],
            Placement::Split { sections, .. } => sections
                .iter()
                .map(|section| section.replicas(ranks))
                .collect(),
        })
        .filter(|replicas| *replicas > 1)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    let form = |size| Ok((size, groups.tensor_neighbours(size)?));
    sizes.into_iter().map(form).collect()
}
