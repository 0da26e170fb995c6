//! Elementary functions of f32. They have no branches and calls, so that loops over them are vectorized.

/// Returns `e^x`, computed as `2^n e^r`. `n` is the integer nearest to `x / ln 2`, and a polynomial approximates `e^r`.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is 0 or infinity. The scale `2^n` is applied in two steps, because an f32 exponent
    // cannot represent 2^128 and the scales of subnormal results. NaN stays NaN.
    let clamped = if x > 89.0 { 89.0 } else { x };
    let clamped = if clamped < -104.0 { -104.0 } else { clamped };
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // The constant ln 2 is split into two parts. The first part has trailing zeros, so that its product with `n` is
    // exact.
    let r = clamped - n * 0.693_359_4;
    let r = r - n * -2.121_944_4e-4;
    // The Taylor series up to degree 7. `|r|` is below 0.35, so the truncation error is below 1e-8.
    let mut p = 1.0 / 5040.0;
    for coefficient in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * r + coefficient;
    }
    let n = shifted.to_bits() as i32 - ROUND.to_bits() as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    p * power(half) * power(n - half)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points() -> impl Iterator<Item = f32> {
        (-130_000..130_000).map(|i| i as f32 * 0.001)
    }

    #[test]
    fn exp_is_within_three_units_in_the_last_place() {
        for x in points().filter(|x| (-87.0..88.7).contains(x)) {
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(
                relative < 3.0 * f64::from(f32::EPSILON),
                "{x}: {relative:e}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(1000.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        let denormal = exp(-100.0);
        assert!(denormal > 0.0 && denormal < f32::MIN_POSITIVE);
    }
}
