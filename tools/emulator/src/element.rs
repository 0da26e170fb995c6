//! The floating-point types of library products and sums, with values as f64.

use half::{bf16, f16};

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Element {
    F64,
    F32,
    F16,
    BF16,
    E4M3,
    E5M2,
}

use Element::{BF16, E4M3, E5M2, F16, F32, F64};

impl Element {
    /// Returns the element type of a `cudaDataType_t`.
    pub(crate) fn of(number: i32) -> Option<Self> {
        match number {
            0 => Some(F32),
            1 => Some(F64),
            2 => Some(F16),
            14 => Some(BF16),
            28 => Some(E4M3),
            29 => Some(E5M2),
            _ => None,
        }
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            F64 => 8,
            F32 => 4,
            F16 | BF16 => 2,
            E4M3 | E5M2 => 1,
        }
    }

    pub(crate) fn is_narrow(self) -> bool {
        self.bytes() == 1
    }

    /// Returns the value of the element at an address.
    ///
    /// # Safety
    /// `address` must be valid for reading an element.
    pub(crate) unsafe fn load(self, address: u64) -> f64 {
        // SAFETY: guaranteed by the caller of this function. No alignment is needed.
        unsafe {
            match self {
                F64 => (address as *const f64).read_unaligned(),
                F32 => (address as *const f32).read_unaligned().into(),
                F16 => f16::from_bits((address as *const u16).read_unaligned()).to_f64(),
                BF16 => bf16::from_bits((address as *const u16).read_unaligned()).to_f64(),
                E4M3 => decode::<4>(*(address as *const u8)),
                E5M2 => decode::<5>(*(address as *const u8)),
            }
        }
    }

    /// Rounds a value once, to nearest even, and stores it at an address. 8-bit types saturate to their largest
    /// number.
    ///
    /// # Safety
    /// `address` must be valid for writing an element.
    pub(crate) unsafe fn store(self, address: u64, value: f64) {
        // SAFETY: guaranteed by the caller of this function. No alignment is needed.
        unsafe {
            match self {
                F64 => (address as *mut f64).write_unaligned(value),
                F32 => (address as *mut f32).write_unaligned(value as f32),
                F16 => {
                    let bits = f16::from_f32(to_odd(value)).to_bits();
                    (address as *mut u16).write_unaligned(bits);
                }
                BF16 => {
                    let bits = bf16::from_f32(to_odd(value)).to_bits();
                    (address as *mut u16).write_unaligned(bits);
                }
                E4M3 => *(address as *mut u8) = encode::<4>(value),
                E5M2 => *(address as *mut u8) = encode::<5>(value),
            }
        }
    }
}

/// Converts to f32 and sets the last bit if the conversion was inexact. A later rounding then acts as a single
/// rounding.
pub(crate) fn to_odd(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) == value || value.is_nan() || near.to_bits() & 1 == 1 {
        return near;
    }
    // The neighbour on the other side of the value is odd.
    if f64::from(near).abs() > value.abs() {
        f32::from_bits(near.to_bits() - 1)
    } else {
        f32::from_bits(near.to_bits() + 1)
    }
}

/// Decodes an 8-bit number with `EXPONENT` bits of exponent. 4 is E4M3, without infinities, and 5 is E5M2.
pub(crate) fn decode<const EXPONENT: i32>(code: u8) -> f64 {
    let mantissa_bits = 7 - EXPONENT;
    let bias = (1 << (EXPONENT - 1)) - 1;
    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
    let mantissa = f64::from(code & ((1 << mantissa_bits) - 1));
    let unit = 2f64.powi(-mantissa_bits);
    let magnitude = match (EXPONENT, code & 0x7f) {
        (4, 0x7f) | (5, 0x7d..) => f64::NAN,
        (5, 0x7c) => f64::INFINITY,
        _ if exponent == 0 => mantissa * unit * 2f64.powi(1 - bias),
        _ => (1.0 + mantissa * unit) * 2f64.powi(exponent - bias),
    };
    if code >= 0x80 { -magnitude } else { magnitude }
}

pub(crate) fn encode<const EXPONENT: i32>(value: f64) -> u8 {
    let largest = if EXPONENT == 4 { 0x7e } else { 0x7b };
    let magnitude = match value.abs() {
        magnitude if magnitude.is_nan() => 0x7f,
        magnitude if magnitude >= decode::<EXPONENT>(largest) => largest,
        // Codes increase with their values. The nearest code is one of the two neighbours of the value. An even code
        // has an even mantissa.
        magnitude => {
            let above = (1..largest).find(|code| decode::<EXPONENT>(*code) > magnitude);
            let above = above.unwrap_or(largest);
            let below = above - 1;
            let middle = (decode::<EXPONENT>(below) + decode::<EXPONENT>(above)) / 2.0;
            match magnitude.total_cmp(&middle) {
                std::cmp::Ordering::Less => below,
                std::cmp::Ordering::Greater => above,
                std::cmp::Ordering::Equal => below + (below & 1),
            }
        }
    };
    magnitude | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(element: Element, value: f64) -> (u64, f64) {
        let mut place = 0u64;
        let address = &raw mut place as u64;
        // SAFETY: the place has 8 bytes.
        let back = unsafe {
            element.store(address, value);
            element.load(address)
        };
        (place, back)
    }

    #[test]
    fn codes_of_8_bits_are_those_of_the_formats() {
        // Values from the tables of the OCP's "8-bit floating point specification".
        for (code, value) in [
            (0x7e, 448.0),
            (0x08, 0.015625),
            (0x07, 0.013671875),
            (0x01, 0.001953125),
        ] {
            assert_eq!(decode::<4>(code), value);
            assert_eq!(decode::<4>(code | 0x80), -value);
        }
        for (code, value) in [
            (0x7b, 57344.0),
            (0x04, 2f64.powi(-14)),
            (0x03, 0.75 * 2f64.powi(-14)),
        ] {
            assert_eq!(decode::<5>(code), value);
        }
        assert!(decode::<4>(0x7f).is_nan() && decode::<5>(0x7d).is_nan());
        assert_eq!(decode::<5>(0xfc), f64::NEG_INFINITY);
    }

    #[test]
    fn every_code_comes_back() {
        for code in 0..=255u8 {
            for (element, value) in [(E4M3, decode::<4>(code)), (E5M2, decode::<5>(code))] {
                if value.is_finite() {
                    assert_eq!(stored(element, value), (code.into(), value), "{element:?}");
                }
            }
        }
        assert_eq!(stored(E4M3, 1e9).1, 448.0);
        assert_eq!(stored(E5M2, -1e9).1, -57344.0);
        assert_eq!(stored(E4M3, f64::NAN).0, 0x7f);
        // Ties round to the even mantissa.
        assert_eq!(stored(E4M3, 17.0).1, 16.0);
        assert_eq!(stored(E4M3, 19.0).1, 20.0);
    }

    #[test]
    fn values_are_rounded_once() {
        // Slightly above the middle of two numbers. f32 cannot represent the difference.
        let middle = 1.0 + 2f64.powi(-8);
        assert_eq!(stored(BF16, middle).1, 1.0);
        assert_eq!(stored(BF16, middle + 2f64.powi(-40)).1, 1.0 + 2f64.powi(-7));
        let middle = 1.0 + 2f64.powi(-11);
        assert_eq!(stored(F16, middle).1, 1.0);
        assert_eq!(stored(F16, middle + 2f64.powi(-40)).1, 1.0 + 2f64.powi(-10));
        assert_eq!(
            stored(F16, -middle - 2f64.powi(-40)).1,
            -1.0 - 2f64.powi(-10)
        );
        assert_eq!(stored(F16, middle - 2f64.powi(-40)).1, 1.0);
        assert_eq!(stored(F32, 1.0 + 2f64.powi(-24)).1, 1.0);
        assert_eq!(stored(F16, 1e6).1, f64::INFINITY);
        assert!(stored(BF16, f64::NAN).1.is_nan());
        assert_eq!(stored(F64, 0.1).1, 0.1);
    }
}
