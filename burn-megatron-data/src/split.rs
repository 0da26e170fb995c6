//! Splits documents into a training and a held-out part.

use super::documents::DocumentEnd;

/// The inverse of the held-out share of the bytes.
const HELD_OUT_ONE_IN: usize = 10;

/// Splits a single document. Its last tenth is held out (at least one byte), starting at the first byte for which
/// `may_begin` is true.
pub(super) fn split_bytes(bytes: &[u8], may_begin: impl Fn(u8) -> bool) -> (&[u8], &[u8]) {
    let held_out = (bytes.len() / HELD_OUT_ONE_IN).max(1);
    let start = bytes.len() - held_out;
    let moved = bytes[start..].iter().take_while(|byte| !may_begin(**byte));
    bytes.split_at(start + moved.count())
}

/// Decides for each of at least two non-empty documents whether it is held out.
///
/// The documents are visited in the order of the hashes of their keys. A document is held out if that brings the
/// held-out bytes closer to a tenth of all bytes. This is never true for the last document if all others are held out,
/// so the training part is not empty. If every document is too large, the smallest document is held out.
pub(super) fn choose_held_out(documents: &[DocumentEnd]) -> Vec<bool> {
    let start = |i: usize| i.checked_sub(1).map_or(0, |before| documents[before].end);
    let size = |i: usize| documents[i].end - start(i);
    let total = documents.last().map_or(0, |last| last.end);
    let target = total / HELD_OUT_ONE_IN;

    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by_key(|&i| (documents[i].hash, i));

    let mut chosen = vec![false; documents.len()];
    let mut held_out = 0;
    for &i in &order {
        if (held_out + size(i)).abs_diff(target) < held_out.abs_diff(target) {
            chosen[i] = true;
            held_out += size(i);
        }
    }
    if held_out == 0
        && let Some(&smallest) = order.iter().min_by_key(|&&i| size(i))
    {
        chosen[smallest] = true;
    }
    chosen
}

/// Returns the 64-bit FNV-1a hash of the bytes. The split must not depend on the version of a hasher.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::hash;

    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
