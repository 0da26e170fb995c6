//! The number of ranks of an attempt: `--elastic`.

use crate::launch::args::{ElasticRange, MAX_RANKS};
use crate::numbers::count;

/// A number of ranks, and the larger ones that were skipped, with the reasons.
#[derive(Debug, PartialEq, Eq)]
pub struct WorldSize {
    pub ranks: usize,
    pub skipped: Vec<String>,
}

/// The most sizes that an error proposes.
const PROPOSED: usize = 8;

/// The largest number of ranks in `range` for which there are slots and which `fits`.
///
/// # Errors
/// Why no size fits, and which would.
pub fn choose(
    range: ElasticRange,
    slots: usize,
    fits: &dyn Fn(usize) -> Result<(), String>,
) -> Result<WorldSize, String> {
    let mut skipped = vec![];
    for ranks in (range.min..=range.max.min(slots)).rev() {
        match fits(ranks) {
            Ok(()) => return Ok(WorldSize { ranks, skipped }),
            Err(reason) => skipped.push(format!("{ranks} ranks: {reason}")),
        }
    }
    let ElasticRange { min, max } = range;
    let proposed: Vec<_> = (1..=MAX_RANKS.min(4 * max))
        .filter(|ranks| fits(*ranks).is_ok())
        .take(PROPOSED)
        .map(|ranks| ranks.to_string())
        .collect();
    let would_fit = match &proposed[..] {
        [] => "no number of ranks would".into(),
        fit => format!("these numbers of ranks would: {}", fit.join(", ")),
    };
    if slots < min {
        skipped = vec![format!("slots for only {}", count(slots, "rank"))];
    }
    Err(format!(
        "no number of ranks of --elastic {min}:{max} fits: {}; {would_fit}",
        skipped.join("; ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tensor 2, and a global batch of 8: 1, 2, 4 or 8 replicas.
    fn fits(ranks: usize) -> Result<(), String> {
        match ranks {
            _ if !ranks.is_multiple_of(2) => Err("odd".into()),
            _ if !8usize.is_multiple_of(ranks / 2) => Err("8 samples".into()),
            _ => Ok(()),
        }
    }

    #[test]
    fn the_largest_size_that_fits_is_taken() {
        let range = ElasticRange { min: 2, max: 8 };
        let of = |slots| choose(range, slots, &fits);
        let size = |ranks, skipped: &[&str]| {
            let skipped = skipped.iter().map(|text| text.to_string()).collect();
            Ok(WorldSize { ranks, skipped })
        };
        assert_eq!(of(100), size(8, &[]));
        let skipped = ["7 ranks: odd", "6 ranks: 8 samples", "5 ranks: odd"];
        assert_eq!(of(7), size(4, &skipped));
        assert_eq!(of(2), size(2, &[]));
    }

    #[test]
    fn where_none_fits_it_is_said_what_would() {
        let range = ElasticRange { min: 5, max: 7 };
        assert_eq!(
            choose(range, 6, &fits).unwrap_err(),
            "no number of ranks of --elastic 5:7 fits: 6 ranks: 8 samples; 5 ranks: odd; these numbers of ranks would: \
             2, 4, 8, 16"
        );
        assert_eq!(
            choose(range, 3, &fits).unwrap_err(),
            "no number of ranks of --elastic 5:7 fits: slots for only 3 ranks; these numbers of ranks would: 2, 4, 8, 16"
        );
        let none = choose(range, 6, &|_| Err("never".into())).unwrap_err();
        assert!(none.ends_with("; no number of ranks would"), "{none}");
    }
}
