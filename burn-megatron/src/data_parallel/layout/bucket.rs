//! Buckets, and the parameter slices in a range of one.

use std::cmp::Reverse;
use std::ops::Range;

/// A range of a buffer that is reduced and gathered by one collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The unit of the model to which all of its parameters belong.
    pub unit: usize,
    /// Whether it has a single parameter, which is shared by the first and the last stage.
    pub shared: bool,
    /// The ranks over which it is sharded.
    pub shards: usize,
    /// Its elements in the buffer, padding included. Empty if all of its parameters are; then nothing is
    /// communicated.
    pub range: Range<usize>,
    /// Its parameters, in reverse order of the table.
    pub parameters: Vec<BucketParameter>,
}

/// A parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketParameter {
    /// Its index in the table.
    pub index: usize,
    /// Its elements, from the start of the bucket.
    pub range: Range<usize>,
}

/// The slice of one parameter in a range of a bucket. It has at least one element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterSlice {
    /// The index of the parameter in the table.
    pub index: usize,
    /// Its elements, from the start of the parameter, flattened.
    pub parameter_range: Range<usize>,
    /// The same elements, from the start of the range.
    pub local_range: Range<usize>,
}

impl Bucket {
    /// Elements of the bucket, padding included.
    pub fn padded(&self) -> usize {
        self.range.len()
    }

    /// Elements up to the end of the last parameter: without the padding at the end, but with the alignment
    /// padding between parameters.
    pub fn used(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// The elements that belong to no parameter: alignment and padding.
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

    /// Elements of its parameters, without any padding.
    pub fn parameter_elements(&self) -> usize {
        self.parameters
            .iter()
            .map(|parameter| parameter.range.len())
            .sum()
    }

    /// The sort key of the order in which backward finishes buckets: by the lowest index in the table, which it
    /// reaches last; those of shared parameters come after all others.
    pub(super) fn order(&self) -> (bool, Reverse<usize>) {
        let last = self.parameters.last().map_or(0, |last| last.index);
        (self.shared, Reverse(last))
    }

    /// Elements of each shard, padding included.
    pub fn shard_elements(&self) -> usize {
        self.padded() / self.shards
    }

    /// The parameter slices in `range`, which is in elements from the start of the bucket. Padding is in no slice.
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
    /// Its slice in `range` of the bucket, if it is not empty.
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
