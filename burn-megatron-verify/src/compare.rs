//! Compares the results of a parallel layout with the results of one rank.

use super::Observation;

/// The lower bound of the scale of a tensor, as a share of the scale of the whole model. The scale is the largest
/// absolute value.
///
/// Some results are zero in exact arithmetic, such as the gradient of a key bias under softmax. Their computed values
/// are rounding noise, which differs between layouts. In f64 the noise is about 1e-16 of the scale of the model. With
/// this lower bound, the relative difference stays below 1e-13. An error in a gradient is still detected if it exceeds
/// 1e-12 of the largest gradient.
const FLOOR: f64 = 1e-2;

/// The lower bound of the scale of a loss, in nats. The loss of a token is a difference of logits, so its rounding
/// error does not become smaller when the loss does.
const LOSS_FLOOR: f64 = 1e-2;

/// The largest relative difference in a column of the report, and the parameter in which it occurs.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The largest absolute difference between the two results, divided by the largest absolute value of the reference.
    ///
    /// The denominator has a lower bound. For a gradient, the lower bound is a hundredth of the largest gradient of the
    /// model. For a weight, it is a hundredth of the largest weight. For a loss, it is 0.01. The difference is infinite
    /// if the lengths of the results differ, if a value is NaN, or if the denominator is zero and the values differ.
    pub relative: f64,
    /// The path of the parameter with the largest difference, for columns that compare parameters.
    pub path: Option<String>,
}

/// The comparison of the results of a layout with the results of one rank. Differences are the largest differences over
/// all ranks of the layout.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// Parameters whose initial weights differ from the initial weights on one rank in at least one bit, and parameters
    /// that no rank of the layout holds.
    pub unequal_weights: Vec<String>,
    /// Parameters whose replicas differed in at least one bit at any time of the run.
    pub unequal_replicas: Vec<String>,
    /// The largest difference of the losses over all steps.
    pub loss: Difference,
    /// The difference of the gradients in the first step.
    pub gradients: Difference,
    /// The difference of the gradients in the last step.
    pub last_gradients: Difference,
    /// The largest difference of the global gradient norms over all steps.
    pub gradient_norm: Difference,
    /// The difference of the weights after the last step.
    pub final_weights: Difference,
}

impl Comparison {
    /// Compares the results of all ranks of a layout with the results of one rank, and returns the largest differences.
    pub fn worst(reference: &Observation, ranks: &[Observation]) -> Self {
        let all = || ranks.iter();
        Self {
            unequal_weights: paths(
                all()
                    .flat_map(|rank| unequal(reference, rank))
                    .chain(missing(reference, ranks)),
            ),
            unequal_replicas: paths(all().flat_map(|rank| rank.unequal_replicas.clone())),
            loss: worst(all().map(|rank| difference(&reference.losses, &rank.losses, LOSS_FLOOR))),
            gradients: worst(
                all().map(|rank| by_path(reference, &reference.gradients, rank, &rank.gradients)),
            ),
            last_gradients: worst(all().map(|rank| {
                by_path(
                    reference,
                    &reference.last_gradients,
                    rank,
                    &rank.last_gradients,
                )
            })),
            gradient_norm: worst(
                all().map(|rank| difference(&reference.gradient_norms, &rank.gradient_norms, 0.0)),
            ),
            final_weights: worst(all().map(|rank| {
                by_path(
                    reference,
                    &reference.final_weights,
                    rank,
                    &rank.final_weights,
                )
            })),
        }
    }

    /// Returns the names of the columns that fail. A column fails if a difference exceeds `tolerance`, or if values
    /// differ that must be bit-equal.
    pub fn failing(&self, tolerance: f64) -> Vec<&'static str> {
        let differences = [
            ("loss", &self.loss),
            ("parameter grad", &self.gradients),
            ("last grad", &self.last_gradients),
            ("grad norm", &self.gradient_norm),
            ("final weights", &self.final_weights),
        ];
        let differ = |(name, difference): (_, &Difference)| {
            // NaN and an invalid tolerance never pass.
            let passes = difference.relative.is_finite() && difference.relative <= tolerance;
            (!passes).then_some(name)
        };
        let initial = (!self.unequal_weights.is_empty()).then_some("initial weights");
        let replicas = (!self.unequal_replicas.is_empty()).then_some("replicas");
        let between = differences.into_iter().filter_map(differ);
        initial.into_iter().chain(between).chain(replicas).collect()
    }

    /// Returns whether no difference exceeds `tolerance`, and the initial weights and the replicas are bit-equal.
    pub fn passes(&self, tolerance: f64) -> bool {
        self.failing(tolerance).is_empty()
    }
}

fn paths(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut all: Vec<_> = all.collect();
    all.sort();
    all.dedup();
    all
}

fn unequal(reference: &Observation, rank: &Observation) -> Vec<String> {
    // NaN is never equal, not even to itself.
    let bits = |values: &Vec<f64>| {
        let bits = values.iter().map(|x| (!x.is_nan()).then(|| x.to_bits()));
        bits.collect::<Option<Vec<_>>>()
    };
    let pairs = matched(
        reference,
        &reference.initial_weights,
        rank,
        &rank.initial_weights,
    );
    pairs
        .filter(|(_, expected, found)| {
            let found = bits(found);
            found.is_none() || expected.and_then(bits) != found
        })
        .map(|(path, ..)| path.clone())
        .collect()
}

/// Returns the parameters of the reference that no rank of the layout holds.
fn missing(reference: &Observation, ranks: &[Observation]) -> Vec<String> {
    let held = |path: &&String| ranks.iter().any(|rank| rank.paths.contains(path));
    reference
        .paths
        .iter()
        .filter(|path| !held(path))
        .cloned()
        .collect()
}

/// Returns each parameter of a rank, with the reference values of the same parameter.
fn matched<'a>(
    reference: &'a Observation,
    expected: &'a [Vec<f64>],
    rank: &'a Observation,
    found: &'a [Vec<f64>],
) -> impl Iterator<Item = (&'a String, Option<&'a Vec<f64>>, &'a Vec<f64>)> {
    rank.paths.iter().zip(found).map(move |(path, found)| {
        let index = reference.paths.iter().position(|other| other == path);
        (path, index.and_then(|index| expected.get(index)), found)
    })
}

fn by_path(
    reference: &Observation,
    expected: &[Vec<f64>],
    rank: &Observation,
    found: &[Vec<f64>],
) -> Difference {
    let floor = FLOOR * largest_finite(expected.iter().flatten());
    let each = matched(reference, expected, rank, found);
    worst(each.map(|(path, expected, found)| Difference {
        path: Some(path.clone()),
        ..difference(expected.map_or(&[], Vec::as_slice), found, floor)
    }))
}

fn worst(all: impl Iterator<Item = Difference>) -> Difference {
    let none = Difference {
        relative: 0.0,
        path: None,
    };
    all.fold(none, |worst, one| {
        if one.relative > worst.relative {
            one
        } else {
            worst
        }
    })
}

/// Returns the largest finite absolute value. Values that are not finite are ignored here, because they always fail the
/// check. They must not hide errors in other values.
fn largest_finite<'a>(values: impl Iterator<Item = &'a f64>) -> f64 {
    let finite = values.filter(|x| x.is_finite());
    finite.fold(0.0, |most, x| most.max(x.abs()))
}

/// Returns the largest difference of two tensors, divided by the largest reference value or `floor`, whichever is
/// larger.
fn difference(expected: &[f64], found: &[f64], floor: f64) -> Difference {
    let largest = |values: &mut dyn Iterator<Item = f64>| {
        // `max` would skip NaN.
        values.fold(0.0, |max: f64, x| {
            if x.abs() > max || x.is_nan() {
                x.abs()
            } else {
                max
            }
        })
    };
    let scale = largest(&mut expected.iter().copied()).max(floor);
    let apart = largest(&mut expected.iter().zip(found).map(|(a, b)| a - b));
    let relative = match (expected.len() == found.len(), apart == 0.0) {
        (false, _) => f64::INFINITY,
        (true, true) => 0.0,
        (true, false) if (apart / scale).is_nan() => f64::INFINITY,
        (true, false) => apart / scale,
    };
    Difference {
        relative,
        path: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relative(expected: &[f64], found: &[f64]) -> f64 {
        difference(expected, found, 0.0).relative
    }

    #[test]
    fn differences_are_relative_to_the_largest_element() {
        assert_eq!(relative(&[1.0, -4.0], &[1.5, -4.0]), 0.125);
        assert_eq!(relative(&[0.0, 0.0], &[0.0, -0.0]), 0.0);
    }

    #[test]
    fn what_cannot_be_compared_never_passes() {
        assert_eq!(relative(&[0.0], &[1e-300]), f64::INFINITY);
        assert_eq!(relative(&[1.0, 2.0], &[1.0]), f64::INFINITY);
        for (a, b) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::NAN, f64::NAN)] {
            assert_eq!(relative(&[3.0, a, 2.0], &[3.0, b, 2.0]), f64::INFINITY);
        }
    }

    #[test]
    fn noise_of_a_zero_gradient_passes_and_a_small_wrong_gradient_does_not() {
        let failing = |small: f64, found: f64| {
            let with = |value: f64| {
                let mut observation = observation();
                observation.gradients[0][0] = value;
                observation.final_weights[0][0] = value;
                observation
            };
            Comparison::worst(&with(small), &[with(found)]).failing(1e-10)
        };
        // The largest gradient is 4, and the largest final weight 2.5.
        assert_eq!(failing(1e-16, -3e-16), [""; 0]);
        assert_eq!(failing(0.0, 1e-15), [""; 0]);
        for (small, found) in [(1e-8, 0.0), (1e-8, 2e-8), (0.0, 1e-11)] {
            assert_eq!(failing(small, found), ["parameter grad", "final weights"]);
        }
        assert_eq!(
            failing(f64::INFINITY, 1.0),
            ["parameter grad", "final weights"]
        );
    }

    #[test]
    fn a_loss_near_zero_is_compared_in_nats() {
        let failing = |loss: f64| {
            let with = |loss| Observation {
                losses: vec![loss],
                ..observation()
            };
            Comparison::worst(&with(0.0), &[with(loss)]).failing(1e-10)
        };
        assert_eq!(failing(1e-15), [""; 0]);
        assert_eq!(failing(1e-11), ["loss"]);
    }

    fn observation() -> Observation {
        Observation {
            paths: vec!["a".into(), "b".into()],
            initial_weights: vec![vec![1.0], vec![2.0, -2.0]],
            losses: vec![3.0, 2.0],
            gradients: vec![vec![1.0], vec![4.0, 2.0]],
            last_gradients: vec![vec![3.0], vec![5.0, 1.0]],
            gradient_norms: vec![5.0, 6.0],
            final_weights: vec![vec![1.5], vec![2.5, -1.0]],
            unequal_replicas: vec![],
        }
    }

    /// Returns the columns that fail if the observation of the second of two ranks is changed.
    fn failing(change: impl FnOnce(&mut Observation)) -> (Vec<&'static str>, Comparison) {
        let mut other = observation();
        change(&mut other);
        let comparison = Comparison::worst(&observation(), &[observation(), other]);
        assert_eq!(comparison.passes(0.1), comparison.failing(0.1).is_empty());
        (comparison.failing(0.1), comparison)
    }

    #[test]
    fn each_column_fails_by_itself() {
        assert_eq!(failing(|_| ()).0, [""; 0]);
        assert_eq!(
            failing(|o| o.initial_weights[0][0] += 1e-15).0,
            ["initial weights"]
        );
        assert_eq!(failing(|o| o.losses[1] = 1.0).0, ["loss"]);
        assert_eq!(failing(|o| o.gradients[1][1] = 1.0).0, ["parameter grad"]);
        assert_eq!(failing(|o| o.last_gradients[0][0] = 2.0).0, ["last grad"]);
        assert_eq!(failing(|o| o.gradient_norms[1] = 7.0).0, ["grad norm"]);
        assert_eq!(
            failing(|o| o.final_weights[0][0] = 0.0).0,
            ["final weights"]
        );
        assert_eq!(
            failing(|o| o.unequal_replicas.push("b".into())).0,
            ["replicas"]
        );
    }

    /// NaN in both results also fails, although the bits are equal.
    #[test]
    fn nan_fails_in_each_column_on_either_side_and_on_both() {
        type Field = fn(&mut Observation) -> &mut f64;
        let fields: [(Field, &str); 6] = [
            (|o| &mut o.initial_weights[1][0], "initial weights"),
            (|o| &mut o.losses[1], "loss"),
            (|o| &mut o.gradients[1][1], "parameter grad"),
            (|o| &mut o.last_gradients[1][1], "last grad"),
            (|o| &mut o.gradient_norms[1], "grad norm"),
            (|o| &mut o.final_weights[1][1], "final weights"),
        ];
        for (field, column) in fields {
            for (in_reference, in_rank) in [(true, false), (false, true), (true, true)] {
                for value in [f64::NAN, -f64::NAN] {
                    let with = |wrong: bool| {
                        let mut observation = observation();
                        if wrong {
                            *field(&mut observation) = value;
                        }
                        observation
                    };
                    let ranks = [with(in_rank), with(false)];
                    let comparison = Comparison::worst(&with(in_reference), &ranks);
                    assert_eq!(comparison.failing(1e300), [column]);
                }
            }
        }
    }

    #[test]
    fn nothing_passes_an_invalid_tolerance() {
        let (_, comparison) = failing(|o| o.losses[1] = 2.5);
        assert!(comparison.passes(0.5));
        for tolerance in [f64::NAN, -1.0] {
            assert!(!comparison.passes(tolerance), "{tolerance}");
        }
        let (_, comparison) = failing(|o| o.losses[1] = f64::NAN);
        assert!(!comparison.passes(f64::INFINITY));
    }

    #[test]
    fn the_worst_parameter_is_named() {
        let (_, comparison) = failing(|o| {
            o.gradients[0][0] = 1.2;
            o.gradients[1][0] = 6.0;
        });
        assert_eq!(comparison.gradients.path.as_deref(), Some("b"));
        assert_eq!(comparison.gradients.relative, 0.5);
        let (_, comparison) = failing(|o| o.initial_weights[1][1] = 2.0);
        assert_eq!(comparison.unequal_weights, ["b"]);
    }

    #[test]
    fn what_is_within_the_tolerance_passes() {
        assert!(failing(|o| o.gradients[1][1] += 0.3).0.is_empty());
        assert!(failing(|o| o.losses[0] -= 0.2).0.is_empty());
    }
}
