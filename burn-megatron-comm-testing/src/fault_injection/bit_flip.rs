//! Bit flips, as they are caused by faulty devices or faulty memory.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};
use strum::VariantArray as _;

use burn_megatron_comm::Buffer;

/// The kind of tensor in which a bit is flipped. A [`Fault`](super::Fault) selects a tensor by its number among the
/// tensors of the same kind.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::VariantArray,
)]
#[strum(serialize_all = "lowercase")]
pub enum FlipTarget {
    /// The outputs of the operations of a module in the forward pass.
    Activation,
    /// The gradients that an operation returns in the backward pass.
    Gradient,
    /// The weights of a rank at the start of a step. Each parameter is one tensor.
    Weight,
    /// The optimizer state of a rank at the start of a step. Each kind of state of each parameter is one tensor.
    Optimizer,
    /// The result of a collective or a receive on one rank, or the message of a send.
    Collective,
}

/// A flip of one bit of one element of a tensor. It is written `bit-flip:TARGET` or `bit-flip:TARGET:ELEMENT:BIT`. By
/// default, bit 0 (the lowest bit) of element 0 is flipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitFlip {
    /// The kind of tensor in which the bit is flipped.
    pub target: FlipTarget,
    /// The index of the element. It is taken modulo the number of elements of the tensor.
    pub element: u64,
    /// The index of the bit, counted from the lowest bit. It is taken modulo the number of bits of an element.
    pub bit: u32,
}

/// The prefix of a bit flip in the string form of a fault.
pub(super) const PREFIX: &str = "bit-flip:";

impl FlipTarget {
    /// The list of all kinds of tensors.
    pub const ALL: [Self; 5] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name of the kind in the string form of a fault.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns whether the tensors of this kind belong to the state of a rank, in which bits are flipped at the start
    /// of a step.
    pub fn is_state(self) -> bool {
        matches!(self, Self::Weight | Self::Optimizer)
    }
}

impl BitFlip {
    /// Flips the bit in the bytes of a tensor. `size` is the number of bytes per element. Returns false if the tensor
    /// has no elements.
    pub fn apply(self, bytes: &mut [u8], size: usize) -> bool {
        let elements = bytes.len() / size.max(1);
        if elements == 0 {
            return false;
        }
        let element = (self.element % elements as u64) as usize;
        let bit = self.bit as usize % (8 * size);
        // The byte order of a little-endian machine.
        bytes[element * size + bit / 8] ^= 1 << (bit % 8);
        true
    }

    /// Flips the bit in a buffer. Returns false if the buffer has no elements.
    pub(super) fn apply_to(self, buffer: &mut Buffer) -> bool {
        fn flip<T: Copy, const N: usize>(
            of: BitFlip,
            values: &mut [T],
            to: impl Fn(T) -> [u8; N],
            from: impl Fn([u8; N]) -> T,
        ) -> bool {
            let Some(number) = of.element.checked_rem(values.len() as u64) else {
                return false;
            };
            let value = &mut values[number as usize];
            let mut bytes = to(*value);
            let flipped = BitFlip { element: 0, ..of }.apply(&mut bytes, N);
            *value = from(bytes);
            flipped
        }
        match buffer {
            Buffer::F64(x) => flip(self, x, f64::to_le_bytes, f64::from_le_bytes),
            Buffer::F32(x) => flip(self, x, f32::to_le_bytes, f32::from_le_bytes),
            Buffer::BF16(x) => flip(self, x, bf16::to_le_bytes, bf16::from_le_bytes),
            Buffer::F16(x) => flip(self, x, f16::to_le_bytes, f16::from_le_bytes),
            Buffer::I64(x) => flip(self, x, i64::to_le_bytes, i64::from_le_bytes),
            Buffer::I32(x) => flip(self, x, i32::to_le_bytes, i32::from_le_bytes),
            Buffer::U8(x) => flip(self, x, u8::to_le_bytes, u8::from_le_bytes),
        }
    }
}

impl fmt::Display for BitFlip {
    /// Writes the string form, which can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.target.name())?;
        match (self.element, self.bit) {
            (0, 0) => Ok(()),
            (element, bit) => write!(f, ":{element}:{bit}"),
        }
    }
}

impl FromStr for BitFlip {
    type Err = String;

    /// Parses a bit flip. The error is the reason why the string is invalid.
    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix(PREFIX).unwrap_or(text);
        let parts: Vec<_> = rest.split(':').collect();
        let (name, place) = match parts[..] {
            [name] => (name, None),
            [name, element, bit] => (name, Some((element, bit))),
            _ => {
                return Err(format!(
                    "{text:?} is not {PREFIX}TARGET or {PREFIX}TARGET:ELEMENT:BIT"
                ));
            }
        };
        let target = name.parse().map_err(|_| {
            let names = FlipTarget::ALL.map(FlipTarget::name).join(", ");
            format!("no bit of {name:?} can be flipped: expected {names}")
        })?;
        let (element, bit) = place.unwrap_or(("0", "0"));
        let number = |what: &str, text: &str| format!("{what} is {text:?}, which is not a number");
        Ok(Self {
            target,
            element: element
                .parse()
                .map_err(|_| number("the element", element))?,
            bit: bit.parse().map_err(|_| number("the bit", bit))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_of_one_element_changes_and_changes_back() {
        for mut buffer in [
            Buffer::from(vec![1f64, 2.0, 3.0]),
            vec![1f32, 2.0, 3.0].into(),
            vec![1i64, 2, 3].into(),
            vec![7i32, 8, 9].into(),
            vec![1u8, 2, 3].into(),
        ] {
            let before = buffer.clone();
            let flip: BitFlip = "bit-flip:collective:4:66".parse().unwrap();
            assert!(flip.apply_to(&mut buffer));
            assert_ne!(buffer, before);
            assert!(flip.apply_to(&mut buffer));
            assert_eq!(buffer, before);
        }
        let flip: BitFlip = "bit-flip:weight".parse().unwrap();
        assert!(!flip.apply_to(&mut Buffer::from(Vec::<f32>::new())));
        let mut value = Buffer::from(vec![1f32, 1.0]);
        let sign: BitFlip = "bit-flip:weight:1:31".parse().unwrap();
        assert!(sign.apply_to(&mut value));
        assert_eq!(value, vec![1f32, -1.0].into());
    }

    #[test]
    fn texts_are_read_as_they_are_written() {
        for text in ["bit-flip:gradient", "bit-flip:optimizer:12:3"] {
            assert_eq!(text.parse::<BitFlip>().unwrap().to_string(), text);
        }
        for (text, error) in [
            (
                "bit-flip:weights",
                "no bit of \"weights\" can be flipped: expected activation, gradient, weight, optimizer, collective",
            ),
            (
                "bit-flip:weight:x:1",
                "the element is \"x\", which is not a number",
            ),
            (
                "bit-flip:weight:1",
                "\"bit-flip:weight:1\" is not bit-flip:TARGET or",
            ),
        ] {
            let found = text.parse::<BitFlip>().unwrap_err();
            assert!(found.starts_with(error), "{found}");
        }
    }
}
