//! Assigns slices of the model to the ranks that write a checkpoint, so that each element is written once.

use std::ops::Range;

use super::BufferLayout;
use crate::nn::{LocalShard, MeshRank, ParameterEntry, local_shards};

/// The maximum number of elements that are read or written at once: 64 MiB of f32. Tests use a smaller value,
/// because their parameters are small.
pub(crate) const MAX_ELEMENTS: usize = if cfg!(test) { 40 } else { 1 << 24 };

/// The minimum number of elements per rank for dividing a replicated parameter over the ranks that hold it.
const MIN_SHARE: usize = 1 << 12;

/// A slice of a parameter that a rank writes to a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteItem {
    /// The index of the parameter in the parameter table.
    pub index: usize,
    /// The number of the bucket.
    pub bucket: usize,
    /// The range of elements that contains the slice, relative to the start of the rank's shard of the bucket. Items
    /// with the same range are adjacent in the list of items.
    pub source: Range<usize>,
    /// The flat index of the start of `source` in the rank's local tensor.
    pub local_start: usize,
    /// The slice of the local tensor, and its position in the complete tensor.
    pub shard: LocalShard,
}

/// Returns the slices that `rank` writes to a checkpoint. For each bucket, `ranges` returns two ranges: the range that
/// the rank optimizes, and the part of this range that the rank writes. The other ranks of the data axis write the
/// other parts. Both ranges are relative to the start of the bucket.
///
/// A bucket is always divided over the data axis, whether or not it is sharded. A parameter that is replicated over
/// model axes is divided over the ranks of these axes. If the parameter is small, it is assigned to one rank in
/// round-robin order. A section of a parameter that several ranks replicate is written by the first of these ranks. If
/// several pipeline stages have a copy of a parameter, the first copy is written.
pub fn write_items(
    layout: &BufferLayout,
    entries: &[ParameterEntry],
    rank: &MeshRank,
    ranges: impl Fn(usize) -> (Range<usize>, Range<usize>),
) -> Vec<WriteItem> {
    let mut items = vec![];
    for bucket in 0..layout.bucket_count() {
        let (own, counted) = ranges(bucket);
        for piece in layout.bucket(bucket).slices(counted.clone()) {
            let entry = &entries[piece.index];
            if !entry.is_first_copy(rank) {
                continue;
            }
            let before = counted.start - own.start + piece.local_range.start;
            let range = piece.parameter_range.clone();
            for chunk in chunks(share(entry, rank, piece.index, range)) {
                let start = before + chunk.start - piece.parameter_range.start;
                let shards = local_shards(entry, rank, chunk.clone()).into_iter();
                let item = |shard: LocalShard| WriteItem {
                    index: piece.index,
                    bucket,
                    source: start..start + chunk.len(),
                    local_start: chunk.start,
                    shard,
                };
                items.extend(shards.filter(|shard| shard.is_first).map(item));
            }
        }
    }
    items
}

/// Returns the part of a range that a rank writes, among the ranks of the model axes that hold the same
/// elements.
fn share(
    entry: &ParameterEntry,
    rank: &MeshRank,
    index: usize,
    range: Range<usize>,
) -> Range<usize> {
    let place = rank.among(entry.grid, entry.replicated_model_axes());
    let (start, len) = (range.start, range.len());
    let cut = |number: usize| start + len * number / place.size;
    if len >= MIN_SHARE * place.size {
        cut(place.index)..cut(place.index + 1)
    } else if index % place.size == place.index {
        range
    } else {
        start..start
    }
}

/// Divides a range into chunks of at most [`MAX_ELEMENTS`].
pub(crate) fn chunks(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(MAX_ELEMENTS)
        .map(move |start| start..end.min(start + MAX_ELEMENTS))
}
