//! Finds the origin of a difference between two runs of a step.

use std::collections::BTreeMap;
use std::fmt;

use super::compare::Difference;
use burn_megatron::fingerprint::{CallKey, Site};

/// An operation that returned a different result for the same inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// The ranks on which the results differ. A collective can have several.
    pub ranks: Vec<usize>,
    /// The operation.
    pub site: Site,
    /// Whether its inputs already differ although no earlier operation differs. The operation that computed them is not
    /// recorded.
    pub is_before: bool,
    /// The indices of the differing tensors among the results; empty if the operation returned a single tensor.
    pub tensors: Vec<usize>,
}

/// Returns the origins of the differences of all ranks.
///
/// The first difference of a rank is an origin, unless it is a collective with equal inputs on this rank. If another
/// rank gave a different input to the collective, the origin is on that rank. Otherwise the origin is the collective.
pub(super) fn attribute(ranks: &[Vec<Difference>]) -> Vec<Origin> {
    let mut origins = vec![];
    let mut calls: BTreeMap<&CallKey, Vec<usize>> = BTreeMap::new();
    for (rank, differences) in ranks.iter().enumerate() {
        let Some(first) = differences.iter().min_by_key(|it| it.position) else {
            continue;
        };
        match &first.site {
            Site::Call(key) if !first.input => {
                let gives_another = |it: &Difference| it.input && it.site == first.site;
                if !ranks.iter().flatten().any(gives_another) {
                    calls.entry(key).or_default().push(rank);
                }
            }
            site => origins.push(Origin {
                ranks: vec![rank],
                site: site.clone(),
                is_before: first.input,
                tensors: match (site, first.returned) {
                    (Site::Operation { .. }, 2..) => first.outputs.clone(),
                    _ => vec![],
                },
            }),
        }
    }
    origins.extend(calls.into_iter().map(|(key, ranks)| Origin {
        ranks,
        site: Site::Call(key.clone()),
        is_before: false,
        tensors: vec![],
    }));
    origins
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ranks,
            site,
            is_before,
            tensors,
        } = self;
        let list = |all: &[usize]| {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            all.join(", ")
        };
        let ranks_word = if ranks.len() == 1 { "rank" } else { "ranks" };
        write!(f, "on {ranks_word} {} ", list(ranks))?;
        match (is_before, site) {
            (true, site) => write!(
                f,
                "{site} received different inputs, although no recorded value before it differs"
            ),
            (false, Site::Gradient { .. } | Site::Losses) => {
                write!(f, "{site} differs, although all values before it are equal")
            }
            (false, Site::Operation { is_backward, .. }) if !tensors.is_empty() => {
                let what = if *is_backward {
                    "gradient of its input"
                } else {
                    "output"
                };
                let numbers = list(tensors);
                write!(
                    f,
                    "{site} returned a different {what} {numbers} for the same inputs"
                )
            }
            (false, site) => write!(f, "{site} returned a different result for the same inputs"),
        }
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::compare::{Comparison, compare};
    use super::*;
    use burn_megatron::fingerprint::Event;

    fn operation(layer: &str) -> Site {
        Site::Operation {
            function: "LinearFunction".into(),
            layer: layer.into(),
            micro_batch: Some(0),
            is_backward: false,
        }
    }

    fn call(sequence: u64) -> Site {
        Site::Call(CallKey {
            call: "all_reduce over data [0, 1]".into(),
            sequence,
        })
    }

    /// Creates events from their sites, inputs and outputs.
    fn events(values: &[(Site, u64, u64)]) -> Vec<Event> {
        let event = |(site, input, output): &(Site, u64, u64)| Event {
            site: site.clone(),
            input: *input,
            outputs: vec![*output],
        };
        values.iter().map(event).collect()
    }

    fn differences(a: &[Event], b: &[Event]) -> Vec<Difference> {
        match compare(a, b) {
            Comparison::Equal => vec![],
            Comparison::Differ(differences) => differences,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_rank_whose_operation_differs_is_named_and_not_those_that_got_its_result() {
        let good = events(&[
            (operation("a"), 1, 2),
            (call(0), 2, 4),
            (operation("b"), 4, 5),
            (call(1), 5, 10),
        ]);
        let culprit = events(&[
            (operation("a"), 1, 3),
            (call(0), 3, 5),
            (operation("b"), 5, 6),
            (call(1), 6, 12),
        ]);
        let victim = events(&[
            (operation("a"), 1, 2),
            (call(0), 2, 5),
            (operation("b"), 5, 6),
            (call(1), 6, 12),
        ]);
        let found = attribute(&[differences(&good, &victim), differences(&good, &culprit)]);
        let origin = Origin {
            ranks: vec![1],
            site: operation("a"),
            is_before: false,
            tensors: vec![],
        };
        assert_eq!(found, [origin]);
        assert_snapshot!(
            found[0],
            @"on rank 1 the forward of LinearFunction in or after layer a, micro-batch 0 returned a different result \
              for the same inputs"
        );
    }

    #[test]
    fn a_call_is_named_with_the_ranks_that_got_another_result() {
        let good = events(&[(call(0), 2, 4), (operation("b"), 4, 5), (call(1), 5, 10)]);
        let flipped = events(&[(call(0), 2, 6), (operation("b"), 6, 7), (call(1), 7, 12)]);
        let victim = events(&[(call(0), 2, 4), (operation("b"), 4, 5), (call(1), 5, 12)]);
        // The collective returns a different result on one rank.
        let found = attribute(&[differences(&good, &flipped), differences(&good, &victim)]);
        assert_eq!((&found[0].ranks[..], &found[0].site), (&[0][..], &call(0)));
        assert_eq!(found.len(), 1);
        // The collective returns a different result on both ranks.
        let found = attribute(&[differences(&good, &flipped), differences(&good, &flipped)]);
        assert_eq!((&found[0].ranks[..], found.len()), (&[0, 1][..], 1));
    }

    #[test]
    fn a_change_between_recorded_operations_is_named_by_the_next_one() {
        let good = events(&[(operation("a"), 1, 2), (operation("b"), 2, 3)]);
        let changed = events(&[(operation("a"), 1, 2), (operation("b"), 7, 8)]);
        let found = attribute(&[differences(&good, &changed)]);
        assert!(
            found[0].is_before && found[0].site == operation("b"),
            "{found:?}"
        );
        assert!(attribute(&[differences(&good, &good)]).is_empty());
    }

    #[test]
    fn the_tensor_is_named_where_there_are_several() {
        let of = |gradients: &[u64]| Event {
            site: Site::Operation {
                function: "LinearFunction".into(),
                layer: "a".into(),
                micro_batch: Some(3),
                is_backward: true,
            },
            input: 1,
            outputs: gradients.to_vec(),
        };
        let found = attribute(&[vec![], differences(&[of(&[1, 2, 0])], &[of(&[1, 3, 0])])]);
        assert_snapshot!(
            found[0],
            @"on rank 1 the backward of LinearFunction in or after layer a, micro-batch 3 returned a different \
              gradient of its input 1 for the same inputs"
        );
    }

    #[test]
    fn other_operations_are_no_differences() {
        let good = events(&[(operation("a"), 1, 2), (operation("b"), 2, 3)]);
        let shorter = events(&[(operation("a"), 1, 2)]);
        assert!(matches!(
            compare(&good, &shorter),
            Comparison::OtherOperations {
                first: Some(_),
                second: None
            }
        ));
        let other = events(&[(operation("a"), 1, 2), (call(0), 2, 3)]);
        assert!(matches!(
            compare(&good, &other),
            Comparison::OtherOperations { .. }
        ));
    }
}
