//! Tolerances for runs that differ only by the order of sums.

use burn_megatron_train::metrics::StepMetrics;

/// The relative tolerance of losses and gradient norms: 16 ulp of f32. Differences of one or two ulp occur on any
/// processor.
pub const CLOSE: f64 = 16.0 * f32::EPSILON as f64;

/// Asserts that two runs in f32 have the same steps within [`CLOSE`].
#[track_caller]
pub fn assert_steps_near(what: &str, one: &[StepMetrics], other: &[StepMetrics]) {
    assert_steps_within(what, one, other, CLOSE);
}

/// Asserts that two runs have the same steps, losses and norms within a relative tolerance.
#[track_caller]
pub fn assert_steps_within(what: &str, one: &[StepMetrics], other: &[StepMetrics], share: f64) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (a, b) in one.iter().zip(other) {
        let what = format!("{what}, step {}", a.step);
        assert_eq!(
            (a.step, a.tokens, a.skipped),
            (b.step, b.tokens, b.skipped),
            "{what}"
        );
        assert_eq!(a.learning_rate, b.learning_rate, "{what}");
        assert_near(&format!("{what}: loss"), b.loss, a.loss, share);
        let norm = format!("{what}: norm");
        assert_near(&norm, b.gradient_norm, a.gradient_norm, share);
    }
}

/// Asserts that two numbers are equal within a relative tolerance.
#[track_caller]
pub fn assert_near(what: &str, found: f64, expected: f64, share: f64) {
    let apart = (found / expected - 1.0).abs();
    println!("{what}: {apart:.1e} apart");
    assert!(
        apart <= share,
        "{what}: {found}, not {expected}: {apart:.1e} apart"
    );
}

/// Asserts that values differ by at most `tolerance` times the largest expected value.
#[track_caller]
pub fn assert_all_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        let apart = (found - expected).abs() / largest;
        assert!(apart <= tolerance, "{what}: {found} and {expected}");
    }
}
