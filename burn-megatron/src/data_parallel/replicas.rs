//! What ranks that hold the same parameters have of them.

use std::hash::{DefaultHasher, Hash, Hasher};

use burn::tensor::Tensor;
use burn_megatron_kernels::flat;

use super::counted::{Chosen, Stretch, held_together, whole_where};
use super::gradients::{Gradients, neighbours};
use super::plan::Plan;
use super::store::Store;
use super::usage::Category;
use super::{DataParallelError, i64s};
use crate::collective::{Comm, to_buffer};
use crate::comm::{Buffer, Groups};
use crate::nn::{ParameterTable, Placement};

/// This rank's parts of gradients that are whole over the data axis.
pub(super) fn gradients_of(
    plan: &Plan,
    parts: Vec<Tensor<1>>,
    tokens: u64,
) -> Result<Gradients, DataParallelError> {
    for (part, parameter) in parts.iter().zip(&plan.parameters) {
        let (found, expected) = (part.dims()[0], parameter.shape.iter().product());
        if found != expected {
            let path = parameter.path.clone();
            return Err(DataParallelError::Elements {
                path,
                found,
                expected,
            });
        }
    }
    if parts.len() != plan.parameters.len() {
        return Err(DataParallelError::Elements {
            path: "the list of parameters".into(),
            found: parts.len(),
            expected: plan.parameters.len(),
        });
    }
    let shard = |number: usize| {
        let (own, (_, main)) = (plan.own(number), plan.types(number));
        let mut shard = plan.zeros(own.len(), main);
        for piece in plan.own_pieces(number) {
            let values = parts[piece.index].clone().slice([piece.of_parameter]);
            shard = flat::accumulate(shard, piece.of_range.start, values.cast(main), false);
        }
        plan.hold(shard, Category::Gradients)
    };
    let shards = (0..plan.buckets()).map(shard).collect();
    Ok(Gradients::new(shards, tokens, vec![]))
}

/// Compares the bits of parameters between ranks that hold the same.
pub(super) fn check(
    store: &Store,
    table: &ParameterTable,
    groups: &Groups,
) -> Result<(), DataParallelError> {
    let (plan, place) = (&store.plan, groups.place());
    let everything = whole_where(plan, table, |_| true);
    compare(store, &everything, &plan.axes.replicas)?;
    let replicated = |entry: &crate::nn::ParameterEntry| entry.placement == Placement::Replicated;
    compare(
        store,
        &whole_where(plan, table, replicated),
        groups.tensor(),
    )?;
    compare(
        store,
        &whole_where(plan, table, |entry| entry.at_both_ends),
        groups.ends(),
    )?;
    for (replicas, comm) in neighbours(table, groups)? {
        compare(store, &held_together(plan, table, place, replicas), &comm)?;
    }
    Ok(())
}

/// Compares the chosen elements of some stretches over the ranks of `comm`.
fn compare(store: &Store, stretches: &[Stretch], comm: &Comm) -> Result<(), DataParallelError> {
    if comm.size() == 1 {
        return Ok(());
    }
    let own: Vec<i64> = stretches
        .iter()
        .map(|stretch| hash(store, stretch))
        .collect();
    let all = i64s(comm.all_gather(Buffer::from(own.clone()))?);
    if own.is_empty() {
        return Ok(());
    }
    let ranks = comm.group().ranks();
    // All compare with the first, so that all come to the same answer.
    let first = &all[..own.len()];
    for (rank, other) in ranks.iter().zip(all.chunks(own.len())) {
        if let Some(at) = other.iter().zip(first).position(|(a, b)| a != b) {
            let index = stretches[at].index;
            return Err(DataParallelError::Drifted {
                path: store.plan.parameters[index].path.clone(),
                ranks: [ranks[0], *rank],
            });
        }
    }
    Ok(())
}

fn hash(store: &Store, stretch: &Stretch) -> i64 {
    let kept = store.parameters.kept(stretch.bucket);
    let own = kept.slice([stretch.range.clone()]);
    let own = match &stretch.chosen {
        Chosen::Some(mask) => own.mask_fill(mask.clone().bool_not(), 0.0),
        Chosen::All | Chosen::None => own,
    };
    let mut hasher = DefaultHasher::new();
    match to_buffer(own) {
        Buffer::F64(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        Buffer::F32(values) => values.iter().for_each(|x| x.to_bits().hash(&mut hasher)),
        other => unreachable!(
            "parameters are stepped in f32 or f64, not {}",
            other.dtype()
        ),
    }
    hasher.finish() as i64
}
