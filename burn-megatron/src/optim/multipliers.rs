//! What the groups of parameters come to in this rank's part of each bucket.

use std::ops::Range;

use burn::module::Module;

use super::OptimizerError;
use super::groups::{self, Multipliers, ParameterGroup};
use crate::comm::{Buffer, CommError, ReduceOp};
use crate::data_parallel::DistributedDataParallel;

/// A stretch of what a rank steps of a bucket, of one parameter or of several that are alike.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Run {
    pub range: Range<usize>,
    /// What weight decay is multiplied with.
    pub decay: f64,
    /// What the learning rate is multiplied with.
    pub rate: f64,
}

/// The runs of each bucket; gaps between parameters have none. Every rank of the pipeline must come.
pub(super) fn of_buckets<M: Module>(
    groups: &[ParameterGroup],
    ddp: &DistributedDataParallel<M>,
) -> Result<Vec<Vec<Run>>, OptimizerError> {
    check_matches(groups, ddp)?;
    let entries = ddp.table().entries();
    let parameters = entries.iter().map(|entry| (&entry.path[..], entry.decay));
    let multipliers = groups::resolve(groups, parameters)?;
    let plan = ddp.plan();
    let of_bucket = |bucket| {
        let pieces = plan.own_pieces(bucket).into_iter();
        pieces
            .map(|piece| {
                let Multipliers { decay, rate } = multipliers[piece.index];
                Run {
                    range: piece.of_range,
                    decay,
                    rate,
                }
            })
            .collect()
    };
    Ok((0..plan.buckets()).map(of_bucket).collect())
}

/// A pattern that fits no parameter of any stage is a mistake.
fn check_matches<M: Module>(
    groups: &[ParameterGroup],
    ddp: &DistributedDataParallel<M>,
) -> Result<(), OptimizerError> {
    groups::check(groups)?;
    let paths = || ddp.table().entries().iter().map(|entry| &entry.path[..]);
    let here = groups::unmatched(groups, paths())?;
    if groups.is_empty() {
        return Ok(());
    }
    let flags: Vec<u8> = (0..groups.len())
        .map(|group| u8::from(here.contains(&group)))
        .collect();
    let comm = ddp.groups().pipeline();
    let everywhere = match comm.all_reduce(Buffer::from(flags), ReduceOp::Min)? {
        Buffer::U8(flags) => flags,
        other => unreachable!("u8 went in, {} came out", other.dtype()),
    };
    match everywhere.iter().position(|unmatched| *unmatched == 1) {
        Some(group) => Err(groups::unmatched_error(&groups[group], paths()).into()),
        None => Ok(()),
    }
}

impl From<CommError> for OptimizerError {
    fn from(error: CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}
