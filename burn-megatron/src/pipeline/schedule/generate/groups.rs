//! Checks the size of the groups of micro-batches in an interleaved schedule.

use super::super::ScheduleError;
use super::MAX_COMPUTATIONS;

/// Whether groups of this size are valid: each group, including the last, must fill the pipeline.
fn runs(ranks: usize, micro_batches: usize, group: usize) -> bool {
    let last = micro_batches % group;
    ranks <= group && group <= micro_batches && (last == 0 || last >= ranks)
}

/// Returns an error that lists valid sizes if the group size is invalid.
pub(super) fn check(ranks: usize, micro_batches: usize, group: usize) -> Result<(), ScheduleError> {
    if group > 0 && runs(ranks, micro_batches, group) {
        return Ok(());
    }
    Err(ScheduleError::Group {
        ranks,
        micro_batches,
        group,
        fits: fits(ranks, micro_batches, group),
    })
}

/// Returns valid sizes as text: `a group of 5, or 4 or 8 micro-batches`.
fn fits(ranks: usize, micro_batches: usize, group: usize) -> String {
    let group_runs = |group: &usize| runs(ranks, micro_batches, *group);
    let smaller = (ranks..group.min(micro_batches + 1)).rev().find(group_runs);
    let larger = (group.max(ranks)..=micro_batches).find(group_runs);
    let groups = either(smaller, larger);

    let count_runs = |count: &usize| group >= ranks && runs(ranks, *count, group);
    let fewer = (1..micro_batches).rev().find(count_runs);
    // A multiple of the group size is valid, so only few numbers are tried.
    let most = micro_batches.saturating_add(group).min(MAX_COMPUTATIONS);
    let more = (group.max(micro_batches + 1)..=most).find(count_runs);
    let counts = either(fewer, more);

    match (groups, counts) {
        (Some(groups), Some(counts)) => {
            format!("a group of {groups}, or {counts} micro-batches")
        }
        (Some(groups), None) => format!("a group of {groups}"),
        (None, Some(counts)) => format!("{counts} micro-batches"),
        (None, None) => format!("a group of {ranks} and {ranks} micro-batches or a multiple"),
    }
}

/// Returns the numbers as text: `4 or 8`.
fn either(low: Option<usize>, high: Option<usize>) -> Option<String> {
    match (low, high) {
        (Some(low), Some(high)) => Some(format!("{low} or {high}")),
        (low, high) => low.or(high).map(|only| only.to_string()),
    }
}
