//! Compact lists of ranks. The groups of a device mesh are regular, so a few numbers describe their ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A sequence of ranks with a constant step between consecutive ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankRun {
    first: usize,
    count: usize,
    step: usize,
}

impl RankRun {
    fn last(&self) -> usize {
        self.first + (self.count - 1) * self.step
    }

    /// Returns whether all ranks of the sequence are less than `size`.
    fn is_inside(&self, size: usize) -> bool {
        let last = self.count.checked_sub(1);
        let last = last.and_then(|steps| steps.checked_mul(self.step)?.checked_add(self.first));
        last.is_some_and(|last| last < size)
    }
}

impl fmt::Display for RankRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.count, self.step) {
            (1, _) => write!(f, "{}", self.first),
            (_, 1) => write!(f, "{}-{}", self.first, self.last()),
            (_, step) => write!(f, "{}-{} in steps of {step}", self.first, self.last()),
        }
    }
}

/// A list of ranks, stored compactly as sequences with a constant step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRuns(pub(crate) Vec<RankRun>);

impl RankRuns {
    /// Creates the list that contains `ranks` in the given order.
    pub fn new(ranks: &[usize]) -> Self {
        let (mut runs, mut rest) = (vec![], ranks);
        while let [first, ..] = rest {
            let step = match rest {
                [one, next, ..] if next > one => next - one,
                _ => 1,
            };
            let regular = rest.windows(2).take_while(|pair| pair[1] == pair[0] + step);
            // Two ranks that are not adjacent are stored as two runs.
            let (count, step) = match 1 + regular.count() {
                1 => (1, 1),
                2 if step > 1 => (1, 1),
                count => (count, step),
            };
            let first = *first;
            runs.push(RankRun { first, count, step });
            rest = &rest[count..];
        }
        Self(runs)
    }

    /// Returns the ranks of a list that may come from another process. Returns `None` if a rank is not less than
    /// `size`, or if the list has more than `size` ranks.
    pub fn within(&self, size: usize) -> Option<Vec<usize>> {
        if self.0.len() > size || !self.0.iter().all(|run| run.is_inside(size)) {
            return None;
        }
        let count: usize = self.0.iter().map(|run| run.count.min(size + 1)).sum();
        (count <= size).then(|| self.iter().collect())
    }

    /// Returns an iterator over the ranks. The list must come from this process or must have been
    /// [checked](Self::within).
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        let runs = self.0.iter();
        runs.flat_map(|run| (0..run.count).map(|i| run.first + i * run.step))
    }
}

/// Formats ranks with a verb, for example `"rank 3 has"` or `"ranks 0, 1 have"`. Long sequences are shortened to
/// `"0-7"`.
pub fn ranks_verb(ranks: &[usize], singular: &str, plural: &str) -> String {
    match ranks {
        [rank] => format!("rank {rank} {singular}"),
        _ => format!("ranks {} {plural}", list_ranks(ranks)),
    }
}

/// Formats a list of ranks, for example `"0, 1, 4"`. A list of more than 16 ranks is formatted as ranges, such as
/// `"0-31, 40"` or `"0-16256 in steps of 128"`.
pub fn list_ranks(ranks: &[usize]) -> String {
    const MAX_LISTED: usize = 16;
    let texts: Vec<String> = if ranks.len() <= MAX_LISTED {
        ranks.iter().map(usize::to_string).collect()
    } else {
        let runs = RankRuns::new(ranks);
        runs.0.iter().map(RankRun::to_string).collect()
    };
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(ranks: &[usize]) -> String {
        let runs = RankRuns::new(ranks);
        let texts: Vec<_> = runs.0.iter().map(RankRun::to_string).collect();
        texts.join(", ")
    }

    #[test]
    fn regular_groups_take_a_few_numbers() {
        assert_eq!(text(&(0..64).collect::<Vec<_>>()), "0-63");
        let data: Vec<_> = (3..16_384).step_by(128).collect();
        insta::assert_snapshot!(text(&data), @"3-16259 in steps of 128");
        assert_eq!(text(&[0, 1, 2, 8, 9, 10]), "0-2, 8-10");
        assert_eq!(text(&[4, 7, 8, 9, 20]), "4, 7-9, 20");
        // Irregular ranks need no more space than a list.
        let pairs: Vec<_> = (0..4).flat_map(|i| [8 * i, 8 * i + 2]).collect();
        assert_eq!(RankRuns::new(&pairs).0.len(), 8);
    }

    #[test]
    fn lists_of_others_are_checked_before_they_are_expanded() {
        let run = |first, count, step| RankRuns(vec![RankRun { first, count, step }]);
        assert_eq!(run(1, 3, 2).within(6), Some(vec![1, 3, 5]));
        assert_eq!(run(1, 3, 2).within(5), None);
        for endless in [
            run(0, usize::MAX, 0),
            run(0, usize::MAX, usize::MAX),
            run(2, 0, 1),
        ] {
            assert_eq!(endless.within(8), None);
        }
        let twice = RankRuns(vec![run(0, 8, 1).0[0]; 2]);
        assert_eq!(twice.within(8), None);
    }

    proptest! {
        #[test]
        fn ranks_are_read_back(ranks in prop::collection::vec(0usize..40, 0..40)) {
            let runs = RankRuns::new(&ranks);
            prop_assert_eq!(runs.iter().collect::<Vec<_>>(), ranks);
        }
    }
}
