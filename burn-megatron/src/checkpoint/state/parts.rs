//! What a rank writes, so that all together write each element of the model once. Pure values.

use std::ops::Range;

use crate::checkpoint::{Slice, held};
use crate::data_parallel::layout::BufferLayout;
use crate::mesh::Place;
use crate::nn::{ParameterEntry, Placement};

/// The most elements that are read or written at once: 64 MiB of f32. Few in tests, whose parameters are
/// small.
pub(super) const MOST: usize = if cfg!(test) { 40 } else { 1 << 24 };

/// A replicated parameter is cut over the ranks of the tensor axis from so many elements for each on.
const WORTH_A_CUT: usize = 1 << 12;

/// A box that a rank writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The parameter's place in the table.
    pub index: usize,
    /// The bucket in which it lies.
    pub bucket: usize,
    /// Where it comes from: elements from the start of what the rank steps of the bucket. Parts of one
    /// stretch follow each other.
    pub stretch: Range<usize>,
    /// Where the stretch begins in the rank's part of the parameter, flattened.
    pub begins: usize,
    /// In the whole parameter.
    pub whole: Slice,
    /// In the rank's part of it.
    pub part: Slice,
}

/// What a rank writes of each tensor. `place` is that on the tensor axis, and `first` says whether it is
/// the first rank of the pipeline. `stretches` gives what it steps of a bucket and, in that, what it
/// answers for among the ranks of the data axis; both from the start of the bucket.
///
/// Over the data axis a bucket is shared as if it were sharded, whether it is or not. On the tensor axis
/// a parameter that all ranks have is cut, or where it is small given to one of them in turn; what
/// neighbours share is the first one's. A parameter of both ends of the pipeline is the first rank's.
pub fn parts(
    layout: &BufferLayout,
    entries: &[ParameterEntry],
    place: Place,
    first: bool,
    stretches: impl Fn(usize) -> (Range<usize>, Range<usize>),
) -> Vec<Part> {
    let mut parts = vec![];
    for bucket in 0..layout.bucket_count() {
        let (own, counted) = stretches(bucket);
        for piece in layout.bucket(bucket).pieces(counted.clone()) {
            let entry = &entries[piece.index];
            if entry.at_both_ends && !first {
                continue;
            }
            let before = counted.start - own.start + piece.of_range.start;
            for chunk in chunks(share(entry, place, piece.index, piece.of_parameter.clone())) {
                let start = before + chunk.start - piece.of_parameter.start;
                let boxes = held(entry, place, chunk.clone()).into_iter();
                let replicated = entry.placement == Placement::Replicated;
                let part = |held: crate::checkpoint::Held| Part {
                    index: piece.index,
                    bucket,
                    stretch: start..start + chunk.len(),
                    begins: chunk.start,
                    whole: held.whole,
                    part: held.part,
                };
                parts.extend(boxes.filter(|held| held.is_first || replicated).map(part));
            }
        }
    }
    parts
}

/// The part of a stretch that a rank of the tensor axis writes, where all of them have it.
fn share(
    entry: &ParameterEntry,
    place: Place,
    index: usize,
    stretch: Range<usize>,
) -> Range<usize> {
    let (start, len) = (stretch.start, stretch.len());
    let cut = |number: usize| start + len * number / place.size;
    match &entry.placement {
        Placement::Split { .. } => stretch,
        Placement::Replicated if len >= WORTH_A_CUT * place.size => {
            cut(place.index)..cut(place.index + 1)
        }
        Placement::Replicated if index % place.size == place.index => stretch,
        Placement::Replicated => start..start,
    }
}

/// A stretch in pieces of a bounded size.
pub(super) fn chunks(stretch: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = stretch.end;
    stretch
        .step_by(MOST)
        .map(move |start| start..end.min(start + MOST))
}
