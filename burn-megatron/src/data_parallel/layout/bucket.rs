//! The buckets of a buffer, and the parameter slices in a range of a bucket.

use std::cmp::Reverse;
use std::ops::Range;

/// A bucket: a range of a buffer that one collective reduces or gathers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The unit of the model (a pipeline stage or FSDP unit) that contains all parameters of the bucket.
    pub unit: usize,
    /// Whether the bucket has a single parameter that the first and the last pipeline stage share.
    pub shared: bool,
    /// The number of ranks over which the bucket is sharded.
    pub shards: usize,
    /// The range of the bucket in the buffer, in elements, including padding. If all parameters of the bucket are
    /// empty, the range is empty and nothing is communicated.
    pub range: Range<usize>,
    /// The parameters of the bucket, in reverse order of the parameter table.
    pub parameters: Vec<BucketParameter>,
}

/// A parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketParameter {
    /// The index of the parameter in the parameter table.
    pub index: usize,
    /// The range of the parameter in the bucket, in elements.
    pub range: Range<usize>,
}

/// A slice of one parameter that lies in a range of a bucket. It has at least one element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSlice {
    /// The index of the parameter in the parameter table.
    pub index: usize,
    /// The elements of the slice, relative to the start of the flattened parameter.
    pub parameter_range: Range<usize>,
    /// The elements of the slice, relative to the start of the range of the bucket.
    pub local_range: Range<usize>,
}

impl Bucket {
    /// Returns the number of elements of the bucket, including padding.
    pub fn padded(&self) -> usize {
        self.range.len()
    }

    /// Returns the number of elements up to the end of the last parameter of the bucket. The number includes the
    /// alignment padding between parameters, but not the padding at the end.
    pub fn used(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// Returns the ranges of the bucket that do not belong to a parameter: the alignment padding between parameters and
    /// the padding at the end.
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

    /// Returns the number of elements of all parameters in the bucket, without any padding.
    pub fn parameter_elements(&self) -> usize {
        self.parameters
            .iter()
            .map(|parameter| parameter.range.len())
            .sum()
    }

    /// Returns a sort key for the order in which the backward finishes buckets. The backward reaches the parameter with
    /// the lowest index in the parameter table last. Buckets of shared parameters come after all other buckets.
    pub(super) fn order(&self) -> (bool, Reverse<usize>) {
        let last = self.parameters.last().map_or(0, |last| last.index);
        (self.shared, Reverse(last))
    }

    /// Returns the number of elements of one shard of the bucket, including padding.
    pub fn shard_elements(&self) -> usize {
        self.padded() / self.shards
    }

    /// Returns the parameter slices that lie in `range`, which is relative to the start of the bucket. Padding does not
    /// belong to a slice.
    ///
    /// # Panics
    ///
    /// Panics if the range exceeds the bucket.
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
