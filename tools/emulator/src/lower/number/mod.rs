//! Numbers of floating-point formats: exact values that are rounded once.
//!
//! This module handles cases without a host instruction: directed rounding, small formats, and conversions. It is
//! exact but not fast. [`quick`] handles the common cases.

pub(super) mod exact;
pub(super) mod quick;
#[cfg(test)]
mod tests;

/// A number independent of a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExactNumber {
    Nan,
    Infinite {
        negative: bool,
    },
    /// `mantissa * 2^exponent`. The mantissa is below 2^127, so that one more bit fits.
    Finite {
        negative: bool,
        mantissa: u128,
        exponent: i32,
    },
}

/// Rounding mode: selects a neighbour of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// `.rn`: to nearest, ties to even.
    Nearest,
    /// `.rna`: to nearest, ties away from zero.
    Away,
    /// `.rz`: towards zero.
    Zero,
    /// `.rm`: towards negative infinity.
    Down,
    /// `.rp`: towards positive infinity.
    Up,
}

/// A floating-point format with a sign bit, an exponent and a fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Format {
    pub exponent: u32,
    pub fraction: u32,
    pub special: Codes,
    /// The bits of the NaN that operations return.
    pub nan: u64,
}

/// The meaning of the codes with the highest exponent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codes {
    /// Infinity and NaNs.
    Ieee,
    /// Numbers, except a NaN if all bits are set.
    OneNan,
    /// Numbers.
    Numbers,
}

const fn format(exponent: u32, fraction: u32, special: Codes, nan: u64) -> Format {
    Format {
        exponent,
        fraction,
        special,
        nan,
    }
}

pub(super) const F64: Format = format(11, 52, Codes::Ieee, 0xfff8_0000_0000_0000);
pub(super) const F32: Format = format(8, 23, Codes::Ieee, 0x7fff_ffff);
pub(super) const F16: Format = format(5, 10, Codes::Ieee, 0x7fff);
pub(super) const BF16: Format = format(8, 7, Codes::Ieee, 0x7fff);
/// The upper 19 bits. Instructions store them in the upper bits of 32 bits.
pub(super) const TF32: Format = format(8, 10, Codes::Ieee, 0x3_ffff);
pub(super) const E4M3: Format = format(4, 3, Codes::OneNan, 0x7f);
pub(super) const E5M2: Format = format(5, 2, Codes::Ieee, 0x7f);
/// NaN becomes the largest number in formats without NaN.
pub(super) const E2M1: Format = format(2, 1, Codes::Numbers, 0x7);
pub(super) const E2M3: Format = format(2, 3, Codes::Numbers, 0x1f);
pub(super) const E3M2: Format = format(3, 2, Codes::Numbers, 0x1f);

impl Mode {
    /// Returns the mode of a modifier, such as `rn` and `rni`.
    pub fn named(modifier: &str) -> Option<Self> {
        Some(match modifier {
            "rn" | "rni" => Self::Nearest,
            "rna" => Self::Away,
            "rz" | "rzi" => Self::Zero,
            "rm" | "rmi" => Self::Down,
            "rp" | "rpi" => Self::Up,
            _ => return None,
        })
    }
}

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn sign(self, negative: bool) -> u64 {
        u64::from(negative) << (self.exponent + self.fraction)
    }

    fn highest(self) -> u64 {
        (1 << self.exponent) - 1
    }

    /// Returns the number of bits.
    pub fn length(self) -> u32 {
        1 + self.exponent + self.fraction
    }

    /// Returns a mask of all bits.
    pub fn ones(self) -> u64 {
        u64::MAX >> (64 - self.length())
    }

    /// Returns the code of the largest number.
    fn largest(self) -> u64 {
        match self.special {
            Codes::Ieee => (self.highest() << self.fraction) - 1,
            Codes::OneNan => (1 << (self.exponent + self.fraction)) - 2,
            Codes::Numbers => (1 << (self.exponent + self.fraction)) - 1,
        }
    }

    pub fn decode(self, bits: u64) -> ExactNumber {
        let negative = bits >> (self.exponent + self.fraction) & 1 == 1;
        let fraction = bits & ((1 << self.fraction) - 1);
        let exponent = bits >> self.fraction & self.highest();
        if exponent == self.highest() {
            let ones = (1 << self.fraction) - 1;
            match (self.special, fraction) {
                (Codes::Ieee, 0) => return ExactNumber::Infinite { negative },
                (Codes::Ieee, _) => return ExactNumber::Nan,
                (Codes::OneNan, all) if all == ones => return ExactNumber::Nan,
                _ => {}
            }
        }
        let normal = u64::from(exponent > 0);
        ExactNumber::Finite {
            negative,
            mantissa: (fraction | normal << self.fraction).into(),
            exponent: exponent.max(1) as i32 - self.bias() - self.fraction as i32,
        }
    }

    /// Encodes a number. A number beyond the largest number becomes infinity. With `saturate` it becomes the largest
    /// number. In formats without infinity it becomes NaN, or the largest number in formats without NaN.
    pub fn encode(self, number: ExactNumber, mode: Mode, saturate: bool) -> u64 {
        let (negative, mantissa, exponent) = match number {
            ExactNumber::Nan => return self.nan,
            ExactNumber::Infinite { negative } => {
                return self.beyond(negative, Mode::Nearest, saturate);
            }
            ExactNumber::Finite {
                negative,
                mantissa: 0,
                ..
            } => return self.sign(negative),
            ExactNumber::Finite {
                negative,
                mantissa,
                exponent,
            } => (negative, mantissa, exponent),
        };
        let top = exponent + mantissa.ilog2() as i32;
        let biased = (top + self.bias()).max(1);
        let drop = biased - self.bias() - self.fraction as i32 - exponent;
        let mantissa = match drop {
            ..=0 => mantissa << -drop,
            _ => shift(mantissa, drop as u32, mode, negative),
        };
        // A carry out of the fraction increments the exponent.
        let code = ((biased as u128 - 1) << self.fraction) + mantissa;
        if code <= self.largest().into() {
            self.sign(negative) | code as u64
        } else {
            self.beyond(negative, mode, saturate)
        }
    }

    fn beyond(self, negative: bool, mode: Mode, saturate: bool) -> u64 {
        let inward = match mode {
            Mode::Nearest | Mode::Away => false,
            Mode::Zero => true,
            Mode::Down => !negative,
            Mode::Up => negative,
        };
        match self.special {
            Codes::Ieee if !saturate && !inward => {
                self.sign(negative) | self.highest() << self.fraction
            }
            Codes::OneNan if !saturate => self.sign(negative) | self.nan,
            _ => self.sign(negative) | self.largest(),
        }
    }
}

/// Returns a number without its lower bits, rounded.
fn shift(mantissa: u128, bits: u32, mode: Mode, negative: bool) -> u128 {
    let (floor, rest, half) = match bits {
        0 => return mantissa,
        // The value is less than a half, since the mantissa has fewer bits.
        128.. => (0, u128::from(mantissa > 0), 2),
        _ => (
            mantissa >> bits,
            mantissa & ((1 << bits) - 1),
            1 << (bits - 1),
        ),
    };
    let up = match mode {
        Mode::Nearest => rest > half || rest == half && floor & 1 == 1,
        Mode::Away => rest >= half,
        Mode::Zero => false,
        Mode::Down => negative && rest > 0,
        Mode::Up => !negative && rest > 0,
    };
    floor + u128::from(up)
}

impl ExactNumber {
    pub fn whole(number: i128) -> Self {
        Self::Finite {
            negative: number < 0,
            mantissa: number.unsigned_abs(),
            exponent: 0,
        }
    }

    pub fn negated(self) -> Self {
        match self {
            Self::Nan => self,
            Self::Infinite { negative } => Self::Infinite {
                negative: !negative,
            },
            Self::Finite {
                negative,
                mantissa,
                exponent,
            } => Self::Finite {
                negative: !negative,
                mantissa,
                exponent,
            },
        }
    }

    pub fn negative(self) -> bool {
        match self {
            Self::Nan => false,
            Self::Infinite { negative } | Self::Finite { negative, .. } => negative,
        }
    }

    /// Rounds to an integer.
    pub fn rounded(self, mode: Mode) -> Self {
        match self {
            Self::Finite {
                negative,
                mantissa,
                exponent,
            } if exponent < 0 => Self::Finite {
                negative,
                mantissa: shift(mantissa, exponent.unsigned_abs(), mode, negative),
                exponent: 0,
            },
            _ => self,
        }
    }

    /// Rounds to an integer between two bounds, or returns `None` for NaN.
    pub fn to_whole(self, mode: Mode, least: i128, most: i128) -> Option<i128> {
        let bound = |negative| if negative { least } else { most };
        match self.rounded(mode) {
            Self::Nan => None,
            Self::Infinite { negative } => Some(bound(negative)),
            Self::Finite { mantissa: 0, .. } => Some(0),
            Self::Finite {
                negative,
                mantissa,
                exponent,
            } => {
                if exponent + mantissa.ilog2() as i32 >= 100 {
                    return Some(bound(negative));
                }
                let size = (mantissa << exponent) as i128;
                Some(if negative { -size } else { size }.clamp(least, most))
            }
        }
    }
}
