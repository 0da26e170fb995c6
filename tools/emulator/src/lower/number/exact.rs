//! Sums, products, quotients and roots that round correctly in every mode. A result that does not fit is cut off, and
//! its last bit is set.

use super::{ExactNumber, Mode};

/// Adds two numbers. The rounding mode determines the sign of a zero sum.
pub fn add(a: ExactNumber, b: ExactNumber, mode: Mode) -> ExactNumber {
    use ExactNumber::{Finite, Infinite, Nan};
    match (a, b) {
        (Nan, _) | (_, Nan) => Nan,
        (Infinite { negative: one }, Infinite { negative: other }) if one != other => Nan,
        (Infinite { .. }, _) => a,
        (_, Infinite { .. }) => b,
        (Finite { mantissa: 0, .. }, Finite { mantissa: 0, .. }) => Finite {
            negative: if a.negative() == b.negative() {
                a.negative()
            } else {
                mode == Mode::Down
            },
            mantissa: 0,
            exponent: 0,
        },
        (Finite { mantissa: 0, .. }, _) => b,
        (_, Finite { mantissa: 0, .. }) => a,
        (
            Finite {
                negative,
                mantissa,
                exponent,
            },
            Finite {
                negative: other_negative,
                mantissa: other_mantissa,
                exponent: other_exponent,
            },
        ) => {
            let top = |mantissa: u128, exponent| exponent + mantissa.ilog2() as i32;
            if top(mantissa, exponent) < top(other_mantissa, other_exponent) {
                return add(b, a, mode);
            }
            // Shifts the larger number up, and leaves one bit for a carry.
            let up = mantissa.leading_zeros() - 2;
            let (large, unit) = (mantissa << up, exponent - up as i32);
            let small = aligned(other_mantissa, other_exponent - unit);
            match negative == other_negative {
                true => finite(negative, large + small, unit),
                false if large == small => Finite {
                    negative: mode == Mode::Down,
                    mantissa: 0,
                    exponent: 0,
                },
                false if large < small => finite(!negative, small - large, unit),
                false => finite(negative, large - small, unit),
            }
        }
    }
}

/// Multiplies two numbers of at most 63 bits each.
pub fn multiply(a: ExactNumber, b: ExactNumber) -> ExactNumber {
    use ExactNumber::{Finite, Infinite, Nan};
    let negative = a.negative() != b.negative();
    match (a, b) {
        (Nan, _) | (_, Nan) => Nan,
        (Infinite { .. }, Finite { mantissa: 0, .. })
        | (Finite { mantissa: 0, .. }, Infinite { .. }) => Nan,
        (Infinite { .. }, _) | (_, Infinite { .. }) => Infinite { negative },
        (
            Finite {
                mantissa, exponent, ..
            },
            Finite {
                mantissa: other,
                exponent: more,
                ..
            },
        ) => finite(negative, mantissa * other, exponent + more),
    }
}

/// Divides two numbers of at most 63 bits each.
pub fn divide(a: ExactNumber, b: ExactNumber) -> ExactNumber {
    use ExactNumber::{Finite, Infinite, Nan};
    let negative = a.negative() != b.negative();
    match (a, b) {
        (Nan, _) | (_, Nan) => Nan,
        (Infinite { .. }, Infinite { .. }) => Nan,
        (Finite { mantissa: 0, .. }, Finite { mantissa: 0, .. }) => Nan,
        (Infinite { .. }, _) | (_, Finite { mantissa: 0, .. }) => Infinite { negative },
        (_, Infinite { .. }) => finite(negative, 0, 0),
        (
            Finite {
                mantissa, exponent, ..
            },
            Finite {
                mantissa: divisor,
                exponent: less,
                ..
            },
        ) => {
            if mantissa == 0 {
                return finite(negative, 0, 0);
            }
            let up = mantissa.leading_zeros() - 1;
            let raised = mantissa << up;
            let rest = u128::from(!raised.is_multiple_of(divisor));
            finite(
                negative,
                (raised / divisor) | rest,
                exponent - up as i32 - less,
            )
        }
    }
}

pub fn square_root(a: ExactNumber) -> ExactNumber {
    match a {
        ExactNumber::Finite {
            mantissa, exponent, ..
        } if mantissa > 0 => {
            if a.negative() {
                return ExactNumber::Nan;
            }
            // An even exponent, and the maximum number of bits.
            let up = mantissa.leading_zeros() - 1;
            let up = up - (exponent - up as i32).rem_euclid(2) as u32;
            let raised = mantissa << up;
            let root = raised.isqrt();
            let rest = u128::from(root * root != raised);
            finite(false, root | rest, (exponent - up as i32) / 2)
        }
        ExactNumber::Infinite { negative: true } => ExactNumber::Nan,
        _ => a,
    }
}

fn finite(negative: bool, mantissa: u128, exponent: i32) -> ExactNumber {
    ExactNumber::Finite {
        negative,
        mantissa,
        exponent,
    }
}

/// Converts a number to another unit, `2^-by` of its current unit.
fn aligned(mantissa: u128, by: i32) -> u128 {
    match by {
        0.. => mantissa << by,
        -127..0 => {
            let cut = mantissa & ((1 << -by) - 1);
            mantissa >> -by | u128::from(cut != 0)
        }
        _ => u128::from(mantissa != 0),
    }
}
