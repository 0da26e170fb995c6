//! Gathers information about all pipeline stages.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::comm::{CommError, ParallelContext, all_gather_bytes};

/// Gathers the entries of all pipeline ranks, sorted by stage. This call is collective over the pipeline axis.
pub(super) fn of_all_stages<T: Serialize + DeserializeOwned>(
    own: &[T],
    stage: impl Fn(&T) -> usize,
    groups: &ParallelContext,
) -> Result<Vec<T>, CommError> {
    let own = match serde_json::to_vec(own) {
        Ok(own) => own,
        Err(error) => unreachable!("paths and numbers are JSON: {error}"),
    };
    let all = all_gather_bytes(&**groups.pipeline(), &own)?;
    let read = |of_rank: &Vec<u8>| match serde_json::from_slice::<Vec<T>>(of_rank) {
        Ok(entries) => entries,
        Err(error) => unreachable!("written by another rank: {error}"),
    };
    let mut entries: Vec<_> = all.iter().flat_map(read).collect();
    entries.sort_by_key(stage);
    Ok(entries)
}
