//! Tests of stop strings and of sampling. Sampling is compared with a reference, and the distribution of its samples is
//! tested.

use burn_megatron_kernels::philox::{Stream, uniform};
use proptest::prelude::*;

use super::stop::StopStringFilter;
use super::*;
use burn_megatron_data::tokenizer::Tokenizer;

fn config(temperature: f64, top_k: Option<usize>, top_p: Option<f64>) -> GenerateConfig {
    GenerateConfig {
        temperature,
        top_k,
        top_p,
        ..GenerateConfig::default()
    }
}

/// A reference implementation that repeatedly takes the most likely remaining token until the limits are reached.
fn reference(config: &GenerateConfig, logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let softmax = |logit: &f64| ((logit - max) / config.temperature).exp();
    let mut left: Vec<Option<f64>> = logits.iter().map(softmax).map(Some).collect();
    let mut order = vec![];
    while order.len() < config.top_k.unwrap_or(usize::MAX) {
        let mut best: Option<(usize, f64)> = None;
        for (token, weight) in left.iter().enumerate() {
            if let Some(weight) = weight
                && best.is_none_or(|(_, most)| *weight > most)
            {
                best = Some((token, *weight));
            }
        }
        let Some((token, weight)) = best else { break };
        left[token] = None;
        order.push((token, weight));
    }
    let sum: f64 = order.iter().map(|(_, weight)| weight).sum();
    let (mut kept, mut reached) = (vec![0.0; logits.len()], 0.0);
    for (token, weight) in order {
        if reached < config.top_p.unwrap_or(2.0) * sum {
            kept[token] = weight;
            reached += weight;
        }
    }
    kept.iter().map(|weight| weight / reached).collect()
}

proptest! {
    #[test]
    fn probabilities_are_those_of_the_reference(
        // Few different values, so that there are ties.
        logits in prop::collection::vec(-6i32..6, 1..40),
        temperature in 0.1f64..3.0,
        top_k in prop::option::of(1usize..50),
        top_p in prop::option::of(0.01f64..=1.0),
    ) {
        let logits: Vec<f64> = logits.into_iter().map(|x| f64::from(x) / 2.0).collect();
        let config = config(temperature, top_k, top_p);
        let found = config.probabilities(&logits).unwrap();
        let expected = reference(&config, &logits);
        for (found, expected) in found.iter().zip(&expected) {
            prop_assert!((found - expected).abs() < 1e-12, "{found} and {expected}");
        }
    }

    /// Checks that the text ends before the first stop string, regardless of how the text is divided into calls.
    #[test]
    fn text_stops_where_it_would_stop_character_by_character(
        pieces in prop::collection::vec("[abé]{0,4}", 0..12),
        stops in prop::collection::vec("[abé]{1,4}", 0..3),
    ) {
        let run = |pieces: &[String]| {
            let (mut until, mut text) = (StopStringFilter::new(&stops), String::new());
            for piece in pieces {
                text.push_str(&until.push(piece));
                if until.is_stopped() {
                    return (text, true);
                }
            }
            text.push_str(&until.finish());
            (text, false)
        };
        let whole = pieces.concat();
        let single: Vec<String> = whole.chars().map(String::from).collect();
        let found = run(&pieces);
        prop_assert_eq!(&found, &run(&single));
        prop_assert_eq!(found.1, stops.iter().any(|stop| whole.contains(stop)));
        prop_assert!(whole.starts_with(&found.0));
        prop_assert!(stops.iter().all(|stop| !found.0.contains(stop)));
        prop_assert!(found.1 || found.0 == whole);
    }
}

#[test]
fn ties_are_for_the_lower_number() {
    let logits = [1.0, 3.0, 3.0, 2.0, 3.0];
    let probabilities = |config: GenerateConfig| config.probabilities(&logits).unwrap();
    assert_eq!(
        probabilities(config(0.0, None, None)),
        [0.0, 1.0, 0.0, 0.0, 0.0]
    );
    assert_eq!(
        probabilities(config(1.0, Some(1), None)),
        [0.0, 1.0, 0.0, 0.0, 0.0]
    );
    assert_eq!(
        probabilities(config(1.0, Some(2), None)),
        [0.0, 0.5, 0.5, 0.0, 0.0]
    );
    // Half of the probability is enough for half of it.
    let half = config(1.0, None, Some(0.5)).probabilities(&[2.0, 2.0]);
    assert_eq!(half.unwrap(), [1.0, 0.0]);
    assert_eq!(
        probabilities(config(1.0, None, Some(1e-9))),
        [0.0, 1.0, 0.0, 0.0, 0.0]
    );
}

#[test]
fn draws_follow_the_cumulated_probabilities() {
    let logits = [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln()];
    let at = |point| config(1.0, None, None).draw(&logits, point).unwrap();
    assert_eq!(
        [at(0.01), at(0.49), at(0.51), at(0.74), at(0.76), at(0.999)],
        [0, 0, 1, 1, 2, 2]
    );
    let low = |point| config(0.01, None, None).draw(&[1.0, 3.0, 2.0], point);
    assert!((1..100).all(|i| low(i as f64 / 100.0) == Some(1)));
    // Rounding at the end never gives an excluded token.
    let kept = config(1.0, Some(1), None);
    assert_eq!(kept.draw(&[2.0, 1.0], 1.0), Some(0));
}

#[test]
fn logits_that_are_not_numbers_draw_nothing() {
    let draw = |logits: &[f64]| config(1.0, None, None).draw(logits, 0.5);
    assert_eq!(draw(&[1.0, f64::NAN]), None);
    assert_eq!(draw(&[1.0, f64::INFINITY]), None);
    assert_eq!(draw(&[f64::NEG_INFINITY]), None);
    assert_eq!(draw(&[]), None);
    assert_eq!(draw(&[f64::NEG_INFINITY, 0.0]), Some(1));
    assert_eq!(config(1e-320, None, None).draw(&[1.0, 2.0], 0.5), Some(1));
}

/// Pearson's chi-squared test: the sum over the tokens of (seen - expected)^2 / expected must be below a limit. By
/// chance, the sum exceeds this limit once in 10,000 tests.
#[test]
fn draws_have_their_distribution() {
    let logits: Vec<f64> = (0..12).map(|i| (f64::from(i) * 1.7).sin() * 2.0).collect();
    // The limits for 11, 4 and 2 degrees of freedom.
    let cases = [
        (config(1.3, None, None), 11, 37.37),
        (config(0.8, Some(5), None), 4, 23.51),
        (config(1.0, Some(8), Some(0.6)), 2, 18.42),
    ];
    for (config, freedom, limit) in cases {
        let mut seen = vec![0u32; logits.len()];
        let count = 40_000;
        Stream::new(9, 0).words(0, count, |_, word| {
            seen[config.draw(&logits, uniform(word)).unwrap()] += 1;
        });
        let expected = config.probabilities(&logits).unwrap();
        let (mut sum, mut tokens) = (0.0, 0);
        for (seen, probability) in seen.iter().zip(expected) {
            let expected = probability * count as f64;
            if probability == 0.0 {
                assert_eq!(*seen, 0);
                continue;
            }
            tokens += 1;
            sum += (f64::from(*seen) - expected).powi(2) / expected;
        }
        assert_eq!(tokens, freedom + 1);
        assert!(sum < limit, "{config:?}: {sum}");
    }
}

#[test]
fn settings_without_a_meaning_are_refused() {
    let error = |config: GenerateConfig| config.check().unwrap_err().to_string();
    let with_stop = |stop: &str| GenerateConfig {
        stop: vec![stop.into()],
        ..GenerateConfig::default()
    };
    insta::assert_snapshot!(
        error(config(-0.5, None, None)),
        @"invalid temperature = -0.5: expected at least 0 (0 takes the most likely token)"
    );
    assert!(error(config(f64::NAN, None, None)).starts_with("invalid temperature = NaN"));
    assert!(error(config(f64::INFINITY, None, None)).starts_with("invalid temperature = inf"));
    assert!(error(config(1.0, Some(0), None)).starts_with("invalid top_k = 0"));
    for top_p in [0.0, 1.01, f64::NAN] {
        assert!(error(config(1.0, None, Some(top_p))).starts_with("invalid top_p = "));
    }
    assert!(error(with_stop("")).starts_with("invalid stop: an empty string"));
    config(0.0, Some(1), Some(1.0)).check().unwrap();
    with_stop("x").check().unwrap();
}

#[test]
fn a_prompt_has_a_token() {
    let tokens = |prompt: &str| {
        let config = GenerateConfig {
            prompt: prompt.into(),
            ..GenerateConfig::default()
        };
        config.prompt_tokens(&Tokenizer::bytes()).unwrap()
    };
    assert_eq!(tokens("fn"), [102, 110]);
    assert_eq!(tokens(""), [10]);
}

#[test]
fn of_several_stops_the_one_that_ends_first_counts() {
    let stops = ["abc", "b", "cab"].map(String::from);
    let mut until = StopStringFilter::new(&stops);
    assert_eq!(until.push("xabc"), "xa");
    assert!(until.is_stopped());
    let mut until = StopStringFilter::new(&stops);
    assert_eq!([until.push("xa"), until.push("ac")], ["x", "aa"]);
    assert!(!until.is_stopped());
    assert_eq!(until.finish(), "c");
}
