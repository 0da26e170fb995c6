//! The cost of an access of a whole warp: sectors of global memory, and passes over the banks of shared memory.

use super::{LANES, Lanes, Mask};

/// Bytes of a sector, as a power of two.
pub(super) const SECTOR: u32 = 5;

/// The number of bytes that all banks deliver in a pass.
const LINE: u64 = 128;

/// The number of different accesses per bank that are compared without sorting. 16-byte accesses of all lanes need
/// this number.
const FEW: usize = 4;

/// Returns the number of sectors that lanes access, with `bytes` (at most a sector, aligned) at each address.
pub(super) fn sectors(addresses: &Lanes) -> u64 {
    let (mut count, mut descents) = (1, 0);
    for lane in 1..LANES {
        let (before, here) = (addresses[lane - 1] >> SECTOR, addresses[lane] >> SECTOR);
        count += u64::from(here != before);
        // The sign of the difference. Addresses are far below the maximum, so it does not overflow.
        descents |= here.wrapping_sub(before) >> 63;
    }
    if descents == 0 {
        return count;
    }
    let mut sectors = *addresses;
    sectors.iter_mut().for_each(|address| *address >>= SECTOR);
    sectors.sort_unstable();
    1 + sectors.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
}

/// Returns the minimum number of passes over the banks for this number of different bytes.
pub(super) fn lines(bytes: usize) -> u64 {
    (bytes as u64).div_ceil(LINE)
}

/// Returns the minimum number of passes over the banks for an access of `bytes` at each address. This is the largest
/// number of different words in one bank, since a word that several lanes read is read once. A GPU may need more
/// passes, since it processes 8-byte accesses in half warps and 16-byte accesses in quarter warps.
pub(super) fn wavefronts(addresses: &Lanes, mask: Mask, bytes: usize) -> u64 {
    // Accesses are aligned. Two lanes access either the same words or different words.
    let width = bytes.max(4) as u64;
    let passes = width.div_ceil(LINE);
    let groups = (LINE / width).max(1);
    let mut of_group = [[u64::MAX; FEW]; LANES];
    let mut counts = [0; LANES];
    for lane in mask.lanes() {
        let access = addresses[lane] / width;
        let group = (access % groups) as usize;
        let (known, count) = (&mut of_group[group], &mut counts[group]);
        if known[..*count].contains(&access) {
            continue;
        }
        if *count == FEW {
            return passes * most_accesses(addresses, mask, width, groups);
        }
        known[*count] = access;
        *count += 1;
    }
    passes * counts.into_iter().max().unwrap_or_default() as u64
}

/// Counts passes like [`wavefronts`], for any number of different accesses.
fn most_accesses(addresses: &Lanes, mask: Mask, width: u64, groups: u64) -> u64 {
    let mut accesses: Vec<_> = mask.lanes().map(|lane| addresses[lane] / width).collect();
    accesses.sort_unstable();
    accesses.dedup();
    let mut counts = [0; LANES];
    accesses
        .iter()
        .for_each(|access| counts[(access % groups) as usize] += 1);
    counts.into_iter().max().unwrap_or_default()
}

/// Returns the number of passes in addition to the passes that the width needs. A pass reads one 4-byte word from
/// each of 32 banks, and delivers it to all lanes that read this word. 8-byte accesses are processed in half warps,
/// and 16-byte accesses in quarter warps.
pub(super) fn conflicts(addresses: &Lanes, mask: Mask, bytes: usize) -> u64 {
    // The common cases: adjacent addresses, or the same address for all lanes.
    let (first, step) = (addresses[0], bytes as u64);
    let (mut beside, mut same) = (0, 0);
    for (lane, address) in addresses.iter().enumerate() {
        beside |= address ^ first.wrapping_add(lane as u64 * step);
        same |= address ^ first;
    }
    if same == 0 || beside == 0 {
        return 0;
    }
    let words = bytes.div_ceil(4);
    let together = LANES / words;
    let phases = (0..words).map(|phase| {
        let lanes = (u32::MAX >> (LANES - together)) << (phase * together);
        passes(addresses, Mask(mask.0 & lanes), words as u64)
    });
    phases.map(|passes| passes.saturating_sub(1)).sum()
}

fn passes(addresses: &Lanes, mask: Mask, words: u64) -> u64 {
    let (mut taken, mut of_bank) = (0u32, [0; LANES]);
    for lane in mask.lanes() {
        let first = addresses[lane] >> 2;
        for word in first..first + words {
            let bank = word as usize % LANES;
            let free = taken >> bank & 1 == 0;
            if !free && of_bank[bank] != word {
                return most_words(addresses, mask, words);
            }
            taken |= 1 << bank;
            of_bank[bank] = word;
        }
    }
    1
}

/// Returns the largest number of different words that one bank must deliver.
fn most_words(addresses: &Lanes, mask: Mask, words: u64) -> u64 {
    let mut wanted = [u64::MAX; LANES];
    let each = mask.lanes().flat_map(|lane| {
        let first = addresses[lane] >> 2;
        first..first + words
    });
    wanted
        .iter_mut()
        .zip(each)
        .for_each(|(to, word)| *to = word);
    wanted.sort_unstable();
    let (mut counts, mut before) = ([0u64; LANES], u64::MAX);
    for word in wanted.into_iter().take_while(|word| *word != u64::MAX) {
        counts[word as usize % LANES] += u64::from(word != before);
        before = word;
    }
    counts.into_iter().max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(mut address: impl FnMut(u64) -> u64) -> Lanes {
        std::array::from_fn(|lane| address(lane as u64))
    }

    #[test]
    fn conflicts_of_banks() {
        let all = Mask::ALL;
        let strided = |stride, bytes| conflicts(&lanes(|lane| lane * stride), all, bytes);
        assert_eq!(strided(4, 4), 0);
        assert_eq!(strided(0, 4), 0, "one word goes to all");
        assert_eq!(strided(8, 4), 1);
        assert_eq!(strided(128, 4), 31);
        assert_eq!(strided(132, 4), 0, "one word of padding");
        assert_eq!(strided(2, 2), 0);
        assert_eq!(strided(64, 2), 15);
        assert_eq!(strided(8, 8), 0);
        assert_eq!(strided(16, 16), 0);
        // In each half of the warp, 16 lanes access the same two banks.
        assert_eq!(strided(128, 8), 2 * 15);
        assert_eq!(strided(128, 16), 4 * 7);
        assert_eq!(conflicts(&lanes(|lane| lane * 128), Mask(0b11), 4), 1);
        assert_eq!(conflicts(&lanes(|lane| lane * 128), Mask(0), 4), 0);
        // Two lanes in different quarter warps never conflict.
        assert_eq!(
            conflicts(&lanes(|lane| lane * 128), Mask(0x0101_0101), 16),
            0
        );
    }

    #[test]
    fn wavefronts_of_a_warp() {
        let strided = |stride, bytes| wavefronts(&lanes(|lane| lane * stride), Mask::ALL, bytes);
        // Adjacent addresses: the number of bytes divided by 128, rounded up.
        assert_eq!(
            [1, 2, 4, 8, 16, 32].map(|bytes| strided(bytes, bytes as usize)),
            [1, 1, 1, 2, 4, 8]
        );
        // The same word for all lanes, of any width.
        assert_eq!([2, 4, 8, 16].map(|bytes| strided(0, bytes)), [1; 4]);
        // All lanes access one bank, and one group of four banks.
        assert_eq!(strided(128, 4), 32);
        assert_eq!(strided(128, 16), 32);
        assert_eq!(strided(132, 4), 1);
        // Two lanes share each 16 bytes: 256 bytes in total.
        assert_eq!(wavefronts(&lanes(|lane| lane / 2 * 16), Mask::ALL, 16), 2);
        assert_eq!(wavefronts(&lanes(|lane| lane * 128), Mask(0b101), 4), 2);
        assert_eq!(wavefronts(&lanes(|lane| lane), Mask(0), 4), 0);
    }

    /// Compares with a count word by word for random addresses: the largest number of different words in a bank.
    #[test]
    fn wavefronts_are_words_of_a_bank() {
        let mut seed = 1u64;
        for bytes in [4, 8, 16] {
            for _ in 0..100 {
                let at = lanes(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (seed >> 33) % 64 * bytes
                });
                let words = at.iter().flat_map(|at| (at / 4)..(at + bytes) / 4);
                let words: std::collections::BTreeSet<_> = words.collect();
                let of_bank = |bank| words.iter().filter(|word| *word % 32 == bank).count();
                let most = (0..32).map(of_bank).max().unwrap() as u64;
                assert_eq!(wavefronts(&at, Mask::ALL, bytes as usize), most);
            }
        }
    }

    #[test]
    fn sectors_of_a_warp() {
        assert_eq!(sectors(&lanes(|lane| 4096 + lane * 4)), 4);
        assert_eq!(sectors(&lanes(|lane| 4096 + 16 + lane * 4)), 5);
        assert_eq!(sectors(&lanes(|lane| 4096 + lane * 16)), 16);
        assert_eq!(sectors(&lanes(|_| 4096)), 1);
        assert_eq!(sectors(&lanes(|lane| 4096 + lane * 32)), 32);
        assert_eq!(sectors(&lanes(|lane| 4096 + (lane * 5 % 32) * 4)), 4);
        assert_eq!(sectors(&lanes(|lane| 4096 - lane * 64)), 32);
    }
}
