//! Finds repeated layers. A recording runs only a few of the repeated layers, and uses their results for all of them.

/// The maximum length of a repeated sequence of layers.
const LONGEST: usize = 8;

/// The number of repetitions that are recorded. The first layer of a stage has no residual sum, the last layer may have
/// a norm after it, and the layers between them are identical.
const RECORDED: usize = 3;

/// The layers of a stage that are not recorded: a number of repetitions of the same sequence of layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Repeat {
    /// The number of layers in a repetition.
    pub period: usize,
    /// The number of repetitions that are not recorded.
    pub times: usize,
}

impl Repeat {
    /// Returns the layers that can be left out at the end of a stage. `kinds` are the kinds of its layers.
    pub fn of(kinds: &[usize]) -> Self {
        let left_out = |it: &Self| it.period * it.times;
        let all = (1..=LONGEST.min(kinds.len())).map(|period| {
            let pairs = kinds[period..].iter().zip(kinds).rev();
            let same = pairs.take_while(|(one, other)| one == other).count();
            let repetitions = (same + period) / period;
            let times = repetitions.saturating_sub(RECORDED);
            Self { period, times }
        });
        let most = all.rev().max_by_key(left_out);
        most.filter(|it| it.times > 0).unwrap_or_default()
    }

    /// Returns the number of layers that are left out.
    pub fn left_out(self) -> usize {
        self.period * self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(kinds: &[usize]) -> (usize, usize) {
        let Repeat { period, times } = Repeat::of(kinds);
        (period, times)
    }

    #[test]
    fn layers_that_repeat_are_found() {
        assert_eq!(of(&[0; 32]), (1, 29));
        assert_eq!(of(&[0; 3]), (0, 0));
        assert_eq!(of(&[]), (0, 0));
        // Three dense layers, then expert layers.
        let experts = [&[0; 3][..], &[1; 58]].concat();
        assert_eq!(of(&experts), (1, 55));
        // A sliding window in every other layer, and in five of six layers.
        assert_eq!(of(&[0, 1].repeat(13)), (2, 10));
        assert_eq!(of(&[0, 0, 0, 0, 0, 1].repeat(5)), (6, 2));
        assert_eq!(of(&[0, 1, 0, 1, 0]), (0, 0));
        // Nothing repeats.
        assert_eq!(of(&(0..40).collect::<Vec<_>>()), (0, 0));
    }
}
