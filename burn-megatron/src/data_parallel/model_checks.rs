//! Checks a model before its buffers are allocated.

use super::error::DataParallelError;
use crate::comm::ParallelContext;
use crate::mesh::{Axis, Grid};
use crate::nn::ParameterTable;

/// Checks that the ranks of a stage have the same parameters.
pub(super) fn check_same_table(
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<(), DataParallelError> {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    for entry in table.entries() {
        (&entry.path, &entry.shape, entry.grid, entry.sum_over).hash(&mut hasher);
        entry.frozen.hash(&mut hasher);
        format!("{:?}", entry.placements).hash(&mut hasher);
    }
    let own = hasher.finish() as i64;
    let all: Vec<i64> = groups.stage().all_gather(vec![own].into())?.into_vec();
    match all.iter().position(|other| *other != own) {
        Some(other) => Err(DataParallelError::ModelMismatch {
            rank: groups.rank(),
            other: groups.stage().group().ranks()[other],
        }),
        None => Ok(()),
    }
}

/// Checks that a stage of the pipeline has experts, if the layout splits experts.
pub(super) fn check_experts(
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<(), DataParallelError> {
    let layout = groups.config();
    if !layout.splits_experts() {
        return Ok(());
    }
    let mut entries = table.entries().iter();
    let own = entries.any(|entry| entry.grid == Grid::Expert);
    let all = groups.pipeline().all_gather(vec![i64::from(own)].into())?;
    if all.into_vec::<i64>().contains(&1) {
        return Ok(());
    }
    Err(DataParallelError::NoExperts {
        expert: layout.expert,
        expert_tensor: groups.mesh().size(Grid::Expert, Axis::ExpertTensor),
    })
}

/// Checks that tied parameters are on the first and the last stage.
pub(super) fn check_tied_parameters(
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<(), DataParallelError> {
    let (rank, ranks) = (groups.pipeline().rank(), groups.pipeline().size());
    let tied = table.entries().iter().find(|entry| entry.is_tied());
    match tied {
        Some(entry) if rank != 0 && rank + 1 != ranks => {
            Err(DataParallelError::TiedParameterPlacement {
                path: entry.path.clone(),
                rank,
                ranks,
            })
        }
        _ => Ok(()),
    }
}
