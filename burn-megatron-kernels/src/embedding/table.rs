//! The table that assigns lookups to the cubes of the kernels.

use std::ops::Range;

use super::SortedLookups;

/// The maximum number of lookups per segment, and therefore per cube. Longer lists of lookups are split, so that no
/// cube takes much longer than the others.
pub(super) const SEGMENT_LOOKUPS: usize = 128;
/// The part number of a segment that holds all lookups of its id.
pub(super) const WHOLE: u32 = u32::MAX;
/// The number of values per segment: its first lookup, the number of lookups, the table row, and the part number.
pub(super) const SEGMENT: usize = 4;
/// The number of values per id with several parts: the first part, the number of parts, and the table row.
pub(super) const SPLIT: usize = 3;

/// The table. It holds the lookups, the segments, and the ids with several segments.
#[derive(Debug)]
pub(super) struct SegmentTable {
    /// The values of the table. The kernels read them as unsigned numbers.
    pub numbers: Vec<i32>,
    pub lookups: usize,
    pub segments: usize,
    pub splits: usize,
    pub parts: usize,
}

impl SegmentTable {
    /// Creates the table for the ids with the indices `found`. Row 0 belongs to the id `first_row`.
    pub(super) fn new(sorted: &SortedLookups, found: Range<usize>, first_row: usize) -> Self {
        let all = sorted.range(found.start).start..sorted.range(found.end - 1).end;
        let (mut segments, mut splits, mut parts) = (vec![], vec![], 0u32);
        for index in found {
            let (row, range) = ((sorted.id(index) - first_row) as u32, sorted.range(index));
            let count = range.len().div_ceil(SEGMENT_LOOKUPS) as u32;
            if count > 1 {
                splits.extend([parts, count, row]);
            }
            for start in range.clone().step_by(SEGMENT_LOOKUPS) {
                let length = SEGMENT_LOOKUPS.min(range.end - start);
                let part = if count > 1 { parts } else { WHOLE };
                parts += u32::from(count > 1);
                segments.extend([(start - all.start) as u32, length as u32, row, part]);
            }
        }
        let mut numbers = sorted.all()[all].to_vec();
        let lookups = numbers.len();
        let counts = (segments.len() / SEGMENT, splits.len() / SPLIT);
        numbers.extend(segments.into_iter().chain(splits).map(|x| x as i32));
        Self {
            numbers,
            lookups,
            segments: counts.0,
            splits: counts.1,
            parts: parts as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lookup_is_in_one_segment_of_its_row() {
        // Ids 0 to 5. Id 3 has more lookups than a segment holds.
        let id = |i: usize| {
            if i.is_multiple_of(3) {
                3
            } else {
                (i % 6) as i32
            }
        };
        let ids: Vec<i32> = (0..1000).map(id).collect();
        let sorted = SortedLookups::new(&ids);
        let table = SegmentTable::new(&sorted, sorted.within(&(2..6)), 2);
        let (lookups, rest) = table.numbers.split_at(table.lookups);
        let (segments, splits) = rest.split_at(table.segments * SEGMENT);
        let mut seen = vec![];
        for segment in segments.chunks(SEGMENT) {
            let (start, count) = (segment[0] as usize, segment[1] as usize);
            assert!(count <= SEGMENT_LOOKUPS);
            for lookup in &lookups[start..start + count] {
                assert_eq!(ids[*lookup as usize] - 2, segment[2]);
                seen.push(*lookup);
            }
        }
        assert_eq!(seen, lookups);
        assert_eq!(seen.len(), ids.iter().filter(|id| **id >= 2).count());
        // Id 3 has 334 lookups in three parts. Ids 2, 4 and 5 have 166 or 167 lookups in two parts each. Row 0 is id 2.
        let rows: Vec<_> = splits
            .chunks(SPLIT)
            .map(|split| [split[1], split[2]])
            .collect();
        assert_eq!(rows, [[2, 0], [3, 1], [2, 2], [2, 3]]);
        assert_eq!((table.parts, table.splits), (9, 4));
    }
}
