//! Element types, and the reduction of one element from each rank.

use half::{bf16, f16};

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    BF16,
    E4M3,
    E5M2,
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Product,
    Max,
    Min,
    Average,
}

impl Type {
    const ALL: [Self; 12] = [
        Self::I8,
        Self::U8,
        Self::I32,
        Self::U32,
        Self::I64,
        Self::U64,
        Self::F16,
        Self::F32,
        Self::F64,
        Self::BF16,
        Self::E4M3,
        Self::E5M2,
    ];

    pub(super) fn of(number: i32) -> Option<Self> {
        Self::ALL.get(usize::try_from(number).ok()?).copied()
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::I8 | Self::U8 | Self::E4M3 | Self::E5M2 => 1,
            Self::F16 | Self::BF16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Reduces inputs of equal length, in their order.
    pub(super) fn reduce(self, inputs: &[&[u8]], reduction: Reduction) -> Vec<u8> {
        match self {
            Self::I8 => reduce::<1, i8>(inputs, reduction),
            Self::U8 => reduce::<1, u8>(inputs, reduction),
            Self::I32 => reduce::<4, i32>(inputs, reduction),
            Self::U32 => reduce::<4, u32>(inputs, reduction),
            Self::I64 => reduce::<8, i64>(inputs, reduction),
            Self::U64 => reduce::<8, u64>(inputs, reduction),
            Self::F16 => reduce::<2, f16>(inputs, reduction),
            Self::F32 => reduce::<4, f32>(inputs, reduction),
            Self::F64 => reduce::<8, f64>(inputs, reduction),
            Self::BF16 => reduce::<2, bf16>(inputs, reduction),
            Self::E4M3 => reduce::<1, Narrow<4>>(inputs, reduction),
            Self::E5M2 => reduce::<1, Narrow<5>>(inputs, reduction),
        }
    }
}

impl Reduction {
    pub(super) fn of(number: i32) -> Option<Self> {
        match number {
            0 => Some(Self::Sum),
            1 => Some(Self::Product),
            2 => Some(Self::Max),
            3 => Some(Self::Min),
            4 => Some(Self::Average),
            _ => None,
        }
    }
}

fn reduce<const BYTES: usize, T: Value<BYTES>>(inputs: &[&[u8]], reduction: Reduction) -> Vec<u8> {
    let Some((first, others)) = inputs.split_first() else {
        return vec![];
    };
    let mut result = first.to_vec();
    let (places, _) = result.as_chunks_mut::<BYTES>();
    for other in others {
        for (place, value) in places.iter_mut().zip(other.as_chunks::<BYTES>().0) {
            let both = T::of(*place).with(T::of(*value), reduction);
            *place = both.bytes();
        }
    }
    if reduction == Reduction::Average {
        for place in places {
            *place = T::of(*place).over(inputs.len()).bytes();
        }
    }
    result
}

/// An element.
trait Value<const BYTES: usize>: Copy {
    fn of(bytes: [u8; BYTES]) -> Self;
    fn bytes(self) -> [u8; BYTES];
    /// Returns the reduction with another element. For an average, this is the sum.
    fn with(self, other: Self, reduction: Reduction) -> Self;
    fn over(self, count: usize) -> Self;
}

macro_rules! integers {
    ($($type:ty: $bytes:literal),*) => {$(
        impl Value<$bytes> for $type {
            fn of(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn bytes(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }

            fn with(self, other: Self, reduction: Reduction) -> Self {
                match reduction {
                    Reduction::Sum | Reduction::Average => self.wrapping_add(other),
                    Reduction::Product => self.wrapping_mul(other),
                    Reduction::Max => self.max(other),
                    Reduction::Min => self.min(other),
                }
            }

            fn over(self, count: usize) -> Self {
                (i128::from(self) / count as i128) as Self
            }
        }
    )*};
}

integers!(i8: 1, u8: 1, i32: 4, u32: 4, i64: 8, u64: 8);

/// Computes in f64. It holds sums and products of two numbers of at most 32 bits exactly, except for a rounding
/// without effect: the precision of f64 is more than twice their precision.
macro_rules! floats {
    ($($type:ty: $bytes:literal, $wide:expr, $narrow:expr;)*) => {$(
        impl Value<$bytes> for $type {
            fn of(bytes: [u8; $bytes]) -> Self {
                Self::from_le_bytes(bytes)
            }

            fn bytes(self) -> [u8; $bytes] {
                self.to_le_bytes()
            }

            fn with(self, other: Self, reduction: Reduction) -> Self {
                $narrow(both($wide(self), $wide(other), reduction))
            }

            fn over(self, count: usize) -> Self {
                $narrow($wide(self) / count as f64)
            }
        }
    )*};
}

floats! {
    f32: 4, f64::from, |value| value as f32;
    f64: 8, |value| value, |value| value;
    f16: 2, f16::to_f64, |value| f16::from_f32(crate::element::to_odd(value));
    bf16: 2, bf16::to_f64, |value| bf16::from_f32(crate::element::to_odd(value));
}

fn both(a: f64, b: f64, reduction: Reduction) -> f64 {
    match reduction {
        Reduction::Sum | Reduction::Average => a + b,
        Reduction::Product => a * b,
        Reduction::Max => a.max(b),
        Reduction::Min => a.min(b),
    }
}

/// An 8-bit number with `EXPONENT` bits of exponent.
#[derive(Clone, Copy)]
struct Narrow<const EXPONENT: i32>(u8);

impl<const EXPONENT: i32> Narrow<EXPONENT> {
    fn wide(self) -> f64 {
        crate::element::decode::<EXPONENT>(self.0)
    }

    fn round(value: f64) -> Self {
        Self(crate::element::encode::<EXPONENT>(value))
    }
}

impl<const EXPONENT: i32> Value<1> for Narrow<EXPONENT> {
    fn of([code]: [u8; 1]) -> Self {
        Self(code)
    }

    fn bytes(self) -> [u8; 1] {
        [self.0]
    }

    fn with(self, other: Self, reduction: Reduction) -> Self {
        Self::round(both(self.wide(), other.wide(), reduction))
    }

    fn over(self, count: usize) -> Self {
        Self::round(self.wide() / count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced<const N: usize>(number: i32, op: i32, ranks: &[[u8; N]]) -> Vec<u8> {
        let inputs: Vec<&[u8]> = ranks.iter().map(|rank| rank.as_slice()).collect();
        let (of, op) = (Type::of(number).unwrap(), Reduction::of(op).unwrap());
        assert_eq!(of.bytes(), N);
        of.reduce(&inputs, op)
    }

    #[test]
    fn every_type_and_every_reduction() {
        macro_rules! check {
            ($number:literal, $make:expr, $expected:expr) => {
                for (op, expected) in $expected.into_iter().enumerate() {
                    let ranks = [3, 5, 4].map(|value| $make(value).to_le_bytes());
                    let found = reduced($number, op as i32, &ranks);
                    assert_eq!(found, $make(expected).to_le_bytes(), "{} {op}", $number);
                }
            };
        }
        let numbers = [12, 60, 5, 3, 4];
        check!(0, |value| value as i8, numbers);
        check!(1, |value| value as u8, numbers);
        check!(2, |value| -> i32 { value }, numbers);
        check!(3, |value| value as u32, numbers);
        check!(4, |value| value as i64, numbers);
        check!(5, |value| value as u64, numbers);
        check!(6, |value| f16::from_f32(value as f32), numbers);
        check!(7, |value| value as f32, numbers);
        check!(8, |value| value as f64, numbers);
        check!(9, |value| bf16::from_f32(value as f32), numbers);
        // Codes of 3, 5, 4 and of 12, 60, 5, 3, 4. E5M2 cannot represent 15 and uses 16.
        for (number, ranks, expected) in [
            (10, [[0x44], [0x4a], [0x48]], [0x54, 0x67, 0x4a, 0x44, 0x48]),
            (11, [[0x42], [0x45], [0x44]], [0x4a, 0x54, 0x45, 0x42, 0x44]),
        ] {
            for (op, expected) in expected.into_iter().enumerate() {
                let found = reduced(number, op as i32, &ranks);
                assert_eq!(found, [expected], "{number} {op}");
            }
        }
        assert!(Type::of(12).is_none() && Type::of(-1).is_none() && Reduction::of(5).is_none());
    }

    #[test]
    fn sums_are_rounded_rank_by_rank_and_integers_wrap() {
        let small = 2f32.powi(-24);
        let ranks = [1.0, small, small].map(f32::to_le_bytes);
        assert_eq!(reduced(7, 0, &ranks), 1f32.to_le_bytes());
        let ranks = [small, small, 1.0].map(f32::to_le_bytes);
        assert_eq!(reduced(7, 0, &ranks), (1.0 + 2.0 * small).to_le_bytes());
        assert_eq!(reduced(1, 0, &[[200], [100]]), [44]);
        assert_eq!(
            reduced(5, 1, &[u64::MAX.to_le_bytes(); 2]),
            1u64.to_le_bytes()
        );
        assert_eq!(
            reduced(2, 4, &[(-7i32).to_le_bytes(), 2i32.to_le_bytes()]),
            (-2i32).to_le_bytes()
        );
    }
}
