//! Converts rows that consist of two halves to rows in which the elements of the halves are interleaved, and back.

/// Interleaves the two halves of each row. A half has `half` elements of `size` bytes. The elements of the first half
/// get the even indices.
pub(super) fn interleave(bytes: &[u8], half: usize, size: usize) -> Vec<u8> {
    let mut to = Vec::with_capacity(bytes.len());
    for row in bytes.chunks_exact(2 * half * size) {
        let (first, second) = row.split_at(half * size);
        let pairs = first.chunks_exact(size).zip(second.chunks_exact(size));
        for (a, b) in pairs {
            to.extend_from_slice(a);
            to.extend_from_slice(b);
        }
    }
    to
}

/// Returns the elements at even indices (`phase = 0`) or odd indices (`phase = 1`) of rows with an even length.
pub(super) fn every_second(bytes: &[u8], phase: usize, size: usize) -> Vec<u8> {
    let mut to = Vec::with_capacity(bytes.len() / 2);
    for pair in bytes.chunks_exact(2 * size) {
        to.extend_from_slice(&pair[phase * size..][..size]);
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_alternate_and_are_found_again() {
        // Two rows of 2 x 3 elements of two bytes.
        let rows: Vec<u8> = (0..24).collect();
        let alternating = interleave(&rows, 3, 2);
        assert_eq!(alternating[..12], [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(
            every_second(&alternating, 0, 2),
            [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]
        );
        assert_eq!(
            every_second(&alternating, 1, 2),
            [6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23]
        );
    }
}
