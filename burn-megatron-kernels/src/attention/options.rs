//! Options of attention: scale, mask and heads.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::KernelError;

/// The mask, which determines the visible keys of a query, and the scale of the scores.
///
/// Query `i` has the position of key `i + keys - queries`, so both sequences end together.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// The factor of the scores. The default is `1 / sqrt(width)`.
    pub scale: Option<f64>,
    /// Soft cap `c` of the scores: a scaled score `s` becomes `c tanh(s / c)`. Only
    /// [`composed`](super::composed) supports it.
    pub soft_cap: Option<f64>,
    /// Whether attention is causal: keys after the position of a query are hidden.
    pub causal: bool,
    /// The sliding window that limits the distance of visible keys.
    pub window: Option<Window>,
    /// The range of visible keys of each query, for document masking or for the keys of another
    /// rank.
    pub ranges: Option<KeyRanges>,
}

/// A sliding window around the position of the query, which is always visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The number of visible keys before the position.
    pub left: usize,
    /// The number of visible keys after the position.
    pub right: usize,
}

/// The heads of a joint projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// The number of query heads, a multiple of `groups`.
    pub heads: usize,
    /// The number of heads of the keys and of the values. Each serves `heads / groups` consecutive
    /// query heads.
    pub groups: usize,
    /// The number of features per head of queries and keys. In a joint projection it is also the
    /// number of features per value head.
    pub width: usize,
}

impl Heads {
    /// Returns the number of features of the joint projection: `(heads + 2 groups) * width`.
    pub fn features(&self) -> usize {
        (self.heads + 2 * self.groups) * self.width
    }
}

/// The range of visible keys for each query of a sequence, shared by all sequences of the batch.
///
/// The starts and the ends of the ranges do not decrease from query to query. With context parallelism, the visible
/// keys of another rank have this form for any assignment of positions.
#[derive(Clone, Debug)]
pub struct KeyRanges {
    ranges: Vec<Range<usize>>,
    keys: usize,
    of_queries: Tensor<2, Int>,
    of_keys: Tensor<2, Int>,
}

impl KeyRanges {
    /// Creates ranges: the keys `ranges[i]` of `keys` are visible to query `i`. An empty range hides all keys.
    ///
    /// `device` must be the device of the attention inputs.
    ///
    /// # Errors
    ///
    /// Returns an error if
    /// - starts or ends decrease,
    /// - a range ends before it starts or past the keys,
    /// - there are more than 2^30 queries or keys.
    pub fn new(
        ranges: Vec<Range<usize>>,
        keys: usize,
        device: &Device,
    ) -> Result<Self, KernelError> {
        let most = ranges.len().max(keys);
        if most > MAX_POSITIONS {
            return Err(refused("length", most, "at most 2^30 queries and keys"));
        }
        let past = ranges
            .iter()
            .find(|range| range.start > range.end || range.end > keys);
        if let Some(range) = past {
            let value = format!("[.., {range:?}, ..] of {keys} keys");
            let fits = "ranges that end at or after their start, and at or before the last key";
            return Err(refused("ranges", value, fits));
        }
        let falls =
            |pair: &&[Range<usize>]| pair[0].start > pair[1].start || pair[0].end > pair[1].end;
        if let Some(pair) = ranges.windows(2).find(falls) {
            let value = format!("[.., {:?}, {:?}, ..]", pair[0], pair[1]);
            let fits = "starts and ends that do not decrease";
            return Err(refused("ranges", value, fits));
        }
        let of_queries = upload(&ranges, device);
        let transposed = transposed(&ranges, keys);
        // Ranges of documents are symmetric.
        let of_keys = if transposed == ranges {
            of_queries.clone()
        } else {
            upload(&transposed, device)
        };
        Ok(Self {
            ranges,
            keys,
            of_queries,
            of_keys,
        })
    }

    /// Creates a document mask: several documents are packed into one sequence, and each token attends only to its own
    /// document.
    ///
    /// Document `d` is `ends[d - 1]..ends[d]`, and the first document starts at 0. A document may
    /// be empty.
    ///
    /// # Errors
    ///
    /// Returns an error if `ends` decreases, or exceeds the limit of 2^30 positions.
    pub fn of_documents(ends: &[usize], device: &Device) -> Result<Self, KernelError> {
        if let Some(fall) = ends.windows(2).find(|pair| pair[0] > pair[1]) {
            let value = format!("[.., {}, {}, ..]", fall[0], fall[1]);
            let fits = "cumulative lengths, which do not decrease";
            return Err(refused("ends", value, fits));
        }
        let length = ends.last().copied().unwrap_or(0);
        if length > MAX_POSITIONS {
            return Err(refused("ends", length, "a list that ends at or below 2^30"));
        }
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let documents = starts.zip(ends.iter().copied());
        let ranges = documents.flat_map(|(start, end)| (start..end).map(move |_| start..end));
        Self::new(ranges.collect(), length, device)
    }

    /// Returns the number of queries.
    pub fn queries(&self) -> usize {
        self.ranges.len()
    }

    /// Returns the number of keys.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Returns whether no key is visible to any query.
    pub fn is_empty(&self) -> bool {
        self.ranges.iter().all(Range::is_empty)
    }

    /// Returns the visible keys of each query.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Returns the first visible key and the end of the visible keys of each query, `[2, queries]`.
    pub(super) fn of_queries(&self) -> &Tensor<2, Int> {
        &self.of_queries
    }

    /// Returns the first query and the end of the queries to which each key is visible, `[2, keys]`.
    pub(super) fn of_keys(&self) -> &Tensor<2, Int> {
        &self.of_keys
    }
}

/// The maximum number of queries or keys of one sequence. Kernels count positions in signed 32-bit
/// integers.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

fn refused(name: &'static str, value: impl ToString, fits: &'static str) -> KernelError {
    KernelError::option("visible keys", name, value, fits)
}

/// Returns for each key the range of queries to which the key is visible. It starts at the first query whose range ends
/// after the key. It ends after the last query whose range starts at or before the key.
fn transposed(ranges: &[Range<usize>], keys: usize) -> Vec<Range<usize>> {
    let (mut start, mut end) = (0, 0);
    let of_key = |key| {
        while ranges.get(start).is_some_and(|range| range.end <= key) {
            start += 1;
        }
        while ranges.get(end).is_some_and(|range| range.start <= key) {
            end += 1;
        }
        start..end.max(start)
    };
    (0..keys).map(of_key).collect()
}

/// Returns the starts, then the ends, `[2, rows]`.
fn upload(ranges: &[Range<usize>], device: &Device) -> Tensor<2, Int> {
    let starts = ranges.iter().map(|range| range.start as i32);
    let ends = ranges.iter().map(|range| range.end as i32);
    let data = TensorData::new(starts.chain(ends).collect::<Vec<_>>(), [2, ranges.len()]);
    // A mask is not part of the autodiff graph, so it is on the plain device.
    Tensor::from_data(data, (&device.clone().inner(), DType::I32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_know_the_queries_that_see_them() {
        let seen_by = |ranges: &[Range<usize>], keys| {
            let sees = |key: usize| {
                let seeing = (0..ranges.len()).filter(move |query| ranges[*query].contains(&key));
                seeing.collect::<Vec<_>>()
            };
            let transposed = transposed(ranges, keys);
            assert!(
                transposed
                    .windows(2)
                    .all(|pair| pair[0].start <= pair[1].start)
            );
            assert!(transposed.windows(2).all(|pair| pair[0].end <= pair[1].end));
            for (key, range) in transposed.into_iter().enumerate() {
                assert_eq!(
                    range.collect::<Vec<_>>(),
                    sees(key),
                    "{ranges:?}: key {key}"
                );
            }
        };
        seen_by(&[0..1, 0..2, 0..3, 1..4], 4);
        seen_by(&[0..0, 0..0, 0..5, 0..5], 5);
        seen_by(&[0..2, 0..2, 2..2, 2..2, 3..6], 7);
        seen_by(&[4..6, 4..6], 7);
        seen_by(&[], 3);
        seen_by(&[0..0, 0..0], 0);
    }
}
