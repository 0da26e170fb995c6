//! Computes the multipliers that the parameter groups set for each segment of this rank's shards.

use std::ops::Range;

use burn::module::Module;

use super::error::OptimizerError;
use super::groups::{self, Multipliers, ParameterGroup};
use crate::collective::first_on_all;
use crate::data_parallel::layout::ParameterSlice;
use crate::data_parallel::{BucketShard, DistributedDataParallel};

/// A range of a rank's shard of a bucket, with the multipliers of its parameter.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupSegment {
    /// The index of the parameter in the parameter table.
    pub index: usize,
    pub range: Range<usize>,
    /// The multiplier of the weight decay.
    pub decay: f64,
    /// The multiplier of the learning rate.
    pub rate: f64,
}

/// Returns the segments of each bucket, without the padding between parameters. Collective: call on all ranks
/// of the pipeline.
pub(super) fn bucket_segments<M: Module>(
    groups: &[ParameterGroup],
    ddp: &DistributedDataParallel<M>,
) -> Result<Vec<Vec<GroupSegment>>, OptimizerError> {
    check_matches(groups, ddp)?;
    let entries = ddp.table().entries();
    let parameters = entries.iter().map(|entry| (&entry.path[..], entry.decay));
    let multipliers = groups::resolve(groups, parameters)?;
    let segment = |slice: &ParameterSlice| {
        let Multipliers { decay, rate, .. } = multipliers[slice.index];
        GroupSegment {
            index: slice.index,
            range: slice.local_range.clone(),
            decay,
            rate,
        }
    };
    let segments = |shard: &BucketShard| shard.slices.iter().map(segment).collect();
    Ok(ddp.shards().iter().map(segments).collect())
}

/// Fails for a pattern that matches no parameter of any stage. Collective: call on all ranks of the pipeline.
fn check_matches<M: Module>(
    groups: &[ParameterGroup],
    ddp: &DistributedDataParallel<M>,
) -> Result<(), OptimizerError> {
    groups::check(groups)?;
    let paths = || ddp.table().entries().iter().map(|entry| &entry.path[..]);
    let unmatched_here = groups::unmatched(groups, paths())?;
    if groups.is_empty() {
        return Ok(());
    }
    let unmatched = (0..groups.len()).map(|group| unmatched_here.contains(&group));
    match first_on_all(unmatched, ddp.groups().pipeline())? {
        Some(group) => Err(groups::unmatched_error(&groups[group], paths()).into()),
        None => Ok(()),
    }
}
