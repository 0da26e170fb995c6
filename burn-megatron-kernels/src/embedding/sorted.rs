//! Embedding lookups, sorted by the table row that they read.

use std::ops::Range;

/// Embedding lookups, sorted by id (the index of the table row). Lookups with the same id keep their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SortedLookups {
    /// The lookups sorted by id, as indices into the original ids.
    lookups: Vec<i32>,
    /// The distinct ids in increasing order.
    ids: Vec<i32>,
    /// The index of the first lookup of each id, followed by the number of lookups.
    starts: Vec<i32>,
}

impl SortedLookups {
    /// Sorts the lookups of `ids`. This takes `O(n log n)` time, so call it in a data loading thread.
    ///
    /// # Panics
    ///
    /// Panics if there are more than 2^31 - 1 ids.
    pub fn new(ids: &[i32]) -> Self {
        let Ok(_) = i32::try_from(ids.len()) else {
            panic!("{} lookups: expected at most {}", ids.len(), i32::MAX)
        };
        let key = |(index, id): (usize, &i32)| i64::from(*id) << 32 | index as i64;
        let mut keys: Vec<i64> = ids.iter().enumerate().map(key).collect();
        keys.sort_unstable();
        let mut sorted = Self::default();
        for (at, key) in keys.into_iter().enumerate() {
            let id = (key >> 32) as i32;
            if sorted.ids.last() != Some(&id) {
                sorted.ids.push(id);
                sorted.starts.push(at as i32);
            }
            sorted.lookups.push(key as i32);
        }
        sorted.starts.push(ids.len() as i32);
        sorted
    }

    /// Returns the number of lookups.
    pub fn len(&self) -> usize {
        self.lookups.len()
    }

    /// Returns whether there are no lookups.
    pub fn is_empty(&self) -> bool {
        self.lookups.is_empty()
    }

    /// Returns the index range of the distinct ids that lie in the range `ids`.
    pub(super) fn within(&self, ids: &Range<usize>) -> Range<usize> {
        let before = |end: usize| self.ids.partition_point(|id| i64::from(*id) < end as i64);
        before(ids.start)..before(ids.end)
    }

    /// Returns the id that has this index among the distinct ids.
    pub(super) fn id(&self, index: usize) -> usize {
        self.ids[index] as usize
    }

    /// Returns the lookups of the id with this index, as a range of [`all`](Self::all).
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        self.starts[index] as usize..self.starts[index + 1] as usize
    }

    /// Returns all lookups, sorted by id.
    pub(super) fn all(&self) -> &[i32] {
        &self.lookups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_of_an_id_keep_their_order() {
        let sorted = SortedLookups::new(&[5, 2, 5, 9, 2, 5]);
        assert_eq!(sorted.all(), [1, 4, 0, 2, 5, 3]);
        assert_eq!(
            (sorted.ids.clone(), sorted.starts.clone()),
            (vec![2, 5, 9], vec![0, 2, 5, 6])
        );
        assert_eq!(sorted.within(&(3..9)), 1..2);
        assert_eq!(sorted.within(&(0..100)), 0..3);
        assert_eq!(sorted.within(&(6..9)), 2..2);
        assert_eq!((sorted.id(1), sorted.range(1)), (5, 2..5));
        let none = SortedLookups::new(&[]);
        assert!(none.is_empty() && none.within(&(0..10)).is_empty());
    }

    #[test]
    fn negative_ids_are_in_no_range() {
        let sorted = SortedLookups::new(&[0, -1, 3, -1]);
        assert_eq!(sorted.within(&(0..4)), 1..3);
        assert_eq!(sorted.range(1), 2..3);
        assert_eq!(sorted.all(), [1, 3, 0, 2]);
    }
}
