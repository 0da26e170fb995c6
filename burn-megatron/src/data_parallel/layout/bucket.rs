//! Buckets, and the parameter slices in a range of a bucket.

use std::cmp::Reverse;
use std::ops::Range;

/// A range of a buffer that is reduced and gathered by one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The unit of the model that contains all of its parameters.
    pub unit: usize,
    /// Whether it has a single parameter, which the first and the last stage share.
    pub shared: bool,
    /// The number of ranks over which it is sharded.
    pub shards: usize,
    /// Its elements in the buffer, including padding. If all of its parameters are empty, the range is empty
    /// and nothing is communicated.
    pub range: Range<usize>,
    /// Its parameters, in reverse order of the table.
    pub parameters: Vec<BucketParameter>,
}

/// A parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketParameter {
    /// Its index in the table.
    pub index: usize,
    /// Its elements, relative to the start of the bucket.
    pub range: Range<usize>,
}

/// The slice of one parameter in a range of a bucket. It has at least one element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSlice {
    /// The index of the parameter in the table.
    pub index: usize,
    /// Its elements, relative to the start of the flattened parameter.
    pub parameter_range: Range<usize>,
    /// The same elements, relative to the start of the range.
    pub local_range: Range<usize>,
}

impl Bucket {
    /// Returns the number of elements, including padding.
    pub fn padded(&self) -> usize {
        self.range.len()
    }

    /// Returns the number of elements up to the end of the last parameter. It excludes the padding at the end,
    /// and includes the alignment padding between parameters.
    pub fn used(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// Returns the ranges of elements that belong to no parameter: alignment and padding.
    pub fn gaps(&self) -> Vec<Range<usize>> {
        let ends = self.parameters.iter().map(|parameter| parameter.range.end);
        let starts = self
            .parameters
            .iter()
            .map(|parameter| parameter.range.start);
        let starts = starts.chain([self.padded()]);
        let gaps = std::iter::once(0).chain(ends).zip(starts);
        gaps.map(|(end, start)| end..start)
            .filter(|gap| !gap.is_empty())
            .collect()
    }

    /// Returns the number of elements of its parameters, without any padding.
    pub fn parameter_elements(&self) -> usize {
        self.parameters
            .iter()
            .map(|parameter| parameter.range.len())
            .sum()
    }

    /// Returns a sort key for the order in which backward finishes buckets. Backward reaches the lowest table
    /// index of a bucket last. Buckets of shared parameters come after all other buckets.
    pub(super) fn order(&self) -> (bool, Reverse<usize>) {
        let last = self.parameters.last().map_or(0, |last| last.index);
        (self.shared, Reverse(last))
    }

    /// Returns the number of elements of each shard, including padding.
    pub fn shard_elements(&self) -> usize {
        self.padded() / self.shards
    }

    /// Returns the parameter slices in `range`, which is relative to the start of the bucket. Padding is in no
    /// slice.
    ///
    /// # Panics
    ///
    /// If the range exceeds the bucket.
    pub fn slices(&self, range: Range<usize>) -> Vec<ParameterSlice> {
        let padded = self.padded();
        assert!(range.end <= padded, "{range:?} of a bucket of {padded}");
        let first = self
            .parameters
            .partition_point(|parameter| parameter.range.end <= range.start);
        self.parameters[first..]
            .iter()
            .take_while(|parameter| parameter.range.start < range.end)
            .filter_map(|parameter| parameter.slice(&range))
            .collect()
    }
}

impl BucketParameter {
    /// Returns its slice in `range` of the bucket, if it is not empty.
    fn slice(&self, range: &Range<usize>) -> Option<ParameterSlice> {
        let start = self.range.start.max(range.start);
        let end = self.range.end.min(range.end);
        (start < end).then(|| ParameterSlice {
            index: self.index,
            parameter_range: start - self.range.start..end - self.range.start,
            local_range: start - range.start..end - range.start,
        })
    }
}
