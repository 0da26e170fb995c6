//! Buckets, and what lies in a stretch of one.

use std::cmp::Reverse;
use std::ops::Range;

/// A stretch of a buffer that is reduced and gathered as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The part of the model that all of its parameters belong to.
    pub part: usize,
    /// Whether it holds a parameter of the first and the last stage, and nothing else.
    pub shared: bool,
    /// The ranks over which it is cut; 1 where it is not.
    pub shards: usize,
    /// Where it lies in its buffer, in elements, padding included. Empty if all of its parameters
    /// are: there is nothing to communicate then.
    pub range: Range<usize>,
    /// Its parameters, in reverse order of the table.
    pub parameters: Vec<Placed>,
}

/// A parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its place in the table.
    pub index: usize,
    /// Its elements, from the start of the bucket.
    pub range: Range<usize>,
}

/// A stretch of one parameter in a stretch of a bucket. It has at least one element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The parameter's place in the table.
    pub index: usize,
    /// Its elements, from the start of the parameter, flattened.
    pub of_parameter: Range<usize>,
    /// The same elements, from the start of the stretch.
    pub of_range: Range<usize>,
}

impl Bucket {
    /// Elements of the bucket, padding included.
    pub fn padded(&self) -> usize {
        self.range.len()
    }

    /// Elements up to the end of the last parameter: without the padding of the end, but with the
    /// gaps before parameters that are aligned.
    pub fn used(&self) -> usize {
        self.parameters.last().map_or(0, |last| last.range.end)
    }

    /// Elements of its parameters, without any padding.
    pub fn parameter_elements(&self) -> usize {
        self.parameters
            .iter()
            .map(|placed| placed.range.len())
            .sum()
    }

    /// The order in which backward ends with buckets: with the lowest place in the table, which it
    /// reaches last; those of shared parameters come after all others.
    pub(super) fn order(&self) -> (bool, Reverse<usize>) {
        let last = self.parameters.last().map_or(0, |last| last.index);
        (self.shared, Reverse(last))
    }

    /// Elements of each of its shards, padding included.
    pub fn shard_elements(&self) -> usize {
        self.padded() / self.shards
    }

    /// What `rank` of the group owns, in elements from the start of the bucket. A bucket that is
    /// not cut is owned by every rank.
    ///
    /// # Panics
    ///
    /// If the bucket is cut over fewer ranks, as for an index into a slice.
    pub fn shard(&self, rank: usize) -> Range<usize> {
        let rank = match self.shards {
            1 => 0,
            shards => {
                assert!(rank < shards, "rank {rank} of a bucket cut over {shards}");
                rank
            }
        };
        let elements = self.shard_elements();
        rank * elements..(rank + 1) * elements
    }

    /// Which stretches of which parameters lie in `range`, in elements from the start of the
    /// bucket. Padding is in no piece.
    ///
    /// # Panics
    ///
    /// If the range reaches beyond the bucket, as for a slice.
    pub fn pieces(&self, range: Range<usize>) -> Vec<Piece> {
        let padded = self.padded();
        assert!(range.end <= padded, "{range:?} of a bucket of {padded}");
        let first = self
            .parameters
            .partition_point(|placed| placed.range.end <= range.start);
        self.parameters[first..]
            .iter()
            .take_while(|placed| placed.range.start < range.end)
            .filter_map(|placed| placed.piece(&range))
            .collect()
    }
}

impl Placed {
    /// What of it lies in `range` of the bucket, if any.
    fn piece(&self, range: &Range<usize>) -> Option<Piece> {
        let start = self.range.start.max(range.start);
        let end = self.range.end.min(range.end);
        (start < end).then(|| Piece {
            index: self.index,
            of_parameter: start - self.range.start..end - self.range.start,
            of_range: start - range.start..end - range.start,
        })
    }
}
