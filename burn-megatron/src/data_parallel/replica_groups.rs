//! The groups of ranks that hold the same parameters, or the same sections of parameters.

use std::collections::BTreeSet;

use crate::collective::Comm;
use crate::comm::{CommError, ParallelContext};
use crate::mesh::{Axis, AxisSet, Grid};
use crate::nn::{ParameterEntry, ParameterTable};

/// Returns the non-empty axis sets that `of` returns for the entries of a table, in a fixed order.
pub(super) fn axis_sets(
    table: &ParameterTable,
    of: impl Fn(&ParameterEntry) -> AxisSet,
) -> BTreeSet<(Grid, AxisSet)> {
    let entries = table.entries().iter();
    let sets = entries.map(|entry| (entry.grid, of(entry)));
    sets.filter(|(_, axes)| !axes.is_empty()).collect()
}

/// Sections that are replicated on several consecutive ranks of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SectionReplicas {
    pub grid: Grid,
    pub axis: Axis,
    /// The number of ranks that hold the same section.
    pub ranks: usize,
}

/// Creates the groups of ranks that hold the same sections. Collective: call on all ranks of the stage.
pub(super) fn replica_groups(
    table: &ParameterTable,
    groups: &ParallelContext,
) -> Result<Vec<(SectionReplicas, Comm)>, CommError> {
    let mut found = BTreeSet::new();
    for entry in table.entries() {
        let grid = entry.grid;
        for (axis, _, sections) in entry.placements.splits() {
            let size = groups.mesh().size(grid, axis);
            for section in sections {
                let ranks = section.replicas(size);
                found.insert(SectionReplicas { grid, axis, ranks });
            }
        }
    }
    let found = found.into_iter().filter(|replicas| replicas.ranks > 1);
    let create = |replicas: SectionReplicas| {
        let SectionReplicas { grid, axis, ranks } = replicas;
        Ok((replicas, groups.subgroups(grid, axis, ranks)?))
    };
    found.map(create).collect()
}
