//! Compares values that must be equal on several ranks.

use std::collections::BTreeMap;

use burn_megatron::collective::Comm;
use burn_megatron::comm::{CommError, all_gather_bytes};
use burn_megatron::fingerprint::folded;

/// The ranks of a group that hold different values of the same item.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DifferingRanks {
    /// The ranks that differ from the majority; empty if no value has a majority.
    others: Vec<usize>,
    /// The other ranks.
    most: Vec<usize>,
}

/// Compares the fingerprints of all ranks of a group, which must have equal length. The first rank of the group returns
/// the index of the first differing fingerprint and the ranks. Collective: call on all ranks of the group.
pub(super) fn differing(
    own: &[u64],
    comm: &Comm,
) -> Result<Option<(usize, DifferingRanks)>, CommError> {
    if comm.size() == 1 {
        return Ok(None);
    }
    let all = vec![folded(own.iter().copied()) as i64];
    let all: Vec<i64> = comm.all_gather(all.into())?.into_vec();
    if all.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(None);
    }
    let bytes: Vec<u8> = own.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    let all = all_gather_bytes(&**comm, &bytes)?;
    let of_part = |number: usize| -> Vec<Option<&[u8]>> {
        let sums = all.iter().map(|bytes| bytes.chunks(8).nth(number));
        sums.collect()
    };
    let mut numbers = 0..own.len();
    let first = numbers.find(|number| of_part(*number).windows(2).any(|pair| pair[0] != pair[1]));
    let found = first.map(|number| (number, split(comm.group().ranks(), &of_part(number))));
    Ok(found.filter(|_| comm.rank() == 0))
}

/// Splits the ranks by whether they have the value of the majority.
fn split<T: Ord>(ranks: &[usize], values: &[T]) -> DifferingRanks {
    let mut counts = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_insert(0) += 1;
    }
    let usual = counts.iter().find(|(_, count)| 2 * **count > values.len());
    let usual = usual.map(|(value, _)| *value);
    let pairs = ranks.iter().zip(values);
    let (most, others): (Vec<_>, Vec<_>) =
        pairs.partition(|(_, value)| usual.is_none_or(|usual| usual == *value));
    let ranks = |pairs: Vec<(&usize, &T)>| pairs.into_iter().map(|(rank, _)| *rank).collect();
    DifferingRanks {
        others: ranks(others),
        most: ranks(most),
    }
}

impl DifferingRanks {
    /// Formats as `on rank 1 WHAT differs from the value on ranks 0, 2`.
    pub fn describe(&self, what: &str) -> String {
        let list = |ranks: &[usize]| {
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
            format!("{word} {}", ranks.join(", "))
        };
        let most = list(&self.most);
        match &self.others[..] {
            [] => format!("on {most} {what} differs, without a majority"),
            others => format!(
                "on {} {what} differs from the value on {most}",
                list(others)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minority_is_named() {
        for (values, text) in [
            (
                &[7, 7, 9][..],
                "on rank 4 x differs from the value on ranks 0, 2",
            ),
            (
                &[9, 7, 7, 7, 8],
                "on ranks 0, 8 x differs from the value on ranks 2, 4, 6",
            ),
            (&[7, 9], "on ranks 0, 2 x differs, without a majority"),
        ] {
            let ranks = [0, 2, 4, 6, 8];
            let found = split(&ranks[..values.len()], values);
            assert_eq!(found.describe("x"), text);
        }
    }
}
