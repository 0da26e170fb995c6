//! Options of attention: scale, mask and the sizes of heads.

use std::ops::Range;

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::KernelError;

/// Options of attention: the scale of the scores and the mask, which determines the visible keys of a query.
///
/// The last query and the last key have the same position: query `i` has the position of key `i + keys - queries`.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// The factor that multiplies the scores. The default is `1 / sqrt(width)`.
    pub scale: Option<f64>,
    /// Soft cap `c` of the scores: a scaled score `s` becomes `c tanh(s / c)`. Only the functions in
    /// [`composed`](super::composed) support it.
    pub soft_cap: Option<f64>,
    /// Whether attention is causal. With causal attention, keys after the position of a query are hidden.
    pub causal: bool,
    /// The sliding window, which hides keys that are too far from the position of the query.
    pub window: Option<Window>,
    /// The range of visible keys of each query. It is used for document masking. Context parallelism also uses it for
    /// the keys of other ranks.
    pub ranges: Option<KeyRanges>,
}

/// A sliding window around the position of a query. The key at this position is always visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The number of visible keys before the position of the query.
    pub left: usize,
    /// The number of visible keys after the position of the query.
    pub right: usize,
}

/// The number of attention heads and their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// The number of query heads, a multiple of `groups`.
    pub heads: usize,
    /// The number of key heads, which equals the number of value heads. Each key head serves `heads / groups`
    /// consecutive query heads.
    pub groups: usize,
    /// The number of features per query head and per key head. In a joint projection, this is also the number of
    /// features per value head.
    pub width: usize,
}

impl Heads {
    /// Returns the number of features of a joint projection of queries, keys and values: `(heads + 2 groups) * width`.
    pub fn features(&self) -> usize {
        (self.heads + 2 * self.groups) * self.width
    }
}

/// The range of visible keys for each query of a sequence. All sequences of the batch share these ranges.
///
/// The starts and the ends of the ranges must not decrease from query to query. In context parallelism, the visible
/// keys of another rank always form such ranges, for any assignment of positions to ranks.
#[derive(Clone, Debug)]
pub struct KeyRanges {
    ranges: Vec<Range<usize>>,
    keys: usize,
    of_queries: Tensor<2, Int>,
    of_keys: Tensor<2, Int>,
}

impl KeyRanges {
    /// Creates key ranges for a sequence of `keys` keys. Query `i` attends to the keys `ranges[i]`. An empty range
    /// hides all keys.
    ///
    /// `device` must be the device of the attention inputs.
    ///
    /// # Errors
    ///
    /// Returns an error if
    /// - the starts or the ends decrease,
    /// - a range ends before its start, or ends after the last key,
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
        // Documents have symmetric ranges.
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
    /// Document `d` has the positions `ends[d - 1]..ends[d]`. The first document starts at position 0. A document may
    /// be empty.
    ///
    /// # Errors
    ///
    /// Returns an error if `ends` decreases or exceeds 2^30 positions.
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

    /// Returns the range of visible keys of each query.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Returns the start and the end of the range of visible keys of each query, `[2, queries]`.
    pub(super) fn of_queries(&self) -> &Tensor<2, Int> {
        &self.of_queries
    }

    /// Returns the start and the end of the range of queries to which each key is visible, `[2, keys]`.
    pub(super) fn of_keys(&self) -> &Tensor<2, Int> {
        &self.of_keys
    }
}

/// The maximum number of queries or keys of one sequence. Kernels use signed 32-bit integers for positions.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

fn refused(name: &'static str, value: impl ToString, fits: &'static str) -> KernelError {
    KernelError::option("visible keys", name, value, fits)
}

/// Returns the range of queries to which each key is visible. A range starts at the first query whose own range ends
/// after the key. It ends after the last query whose own range starts at or before the key.
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

/// Returns a tensor `[2, rows]` with the starts and the ends of the ranges.
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
