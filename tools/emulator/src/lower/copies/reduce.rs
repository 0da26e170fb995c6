//! Reductions of bulk copies with the bytes in global memory.

use half::{bf16, f16};

use super::bulk::KNOWN;
use super::only;
use crate::machine::CopyDirection;
use crate::ptx::Instruction;

/// A function that combines elements.
type Combine = fn(&mut [u8], &[u8]);

/// Replaces each element of the first argument by `$with` of both elements.
macro_rules! combine {
    ($type:ty, $with:expr) => {
        |there, bytes| {
            const SIZE: usize = size_of::<$type>();
            let with: fn($type, $type) -> $type = $with;
            let here = bytes.as_chunks::<SIZE>().0;
            for (there, here) in there.as_chunks_mut::<SIZE>().0.iter_mut().zip(here) {
                let result = with(
                    <$type>::from_le_bytes(*there),
                    <$type>::from_le_bytes(*here),
                );
                *there = result.to_le_bytes();
            }
        }
    };
}

/// Returns the direction of `cp.async.bulk` to global memory, or of `cp.reduce.async.bulk` with its operation and
/// type.
pub(super) fn combine(instruction: &Instruction) -> Result<CopyDirection, String> {
    if !instruction.has("reduce") {
        return only(instruction, KNOWN).map(|()| CopyDirection::Out);
    }
    let operations = ["reduce", "add", "min", "max", "and", "or", "xor", "noftz"];
    let of_type = instruction.modifiers.last().map_or("", String::as_str);
    only(instruction, &[KNOWN, &operations, &[of_type]].concat())?;
    let operation = operations[1..7].iter().find(|name| instruction.has(name));
    let operation = *operation.ok_or("no operation")?;
    let combine: Combine = match (operation, of_type) {
        ("add", "u32" | "s32") => combine!(u32, u32::wrapping_add),
        ("add", "u64" | "s64") => combine!(u64, u64::wrapping_add),
        ("add", "f16") => combine!(f16, |a, b| f16::from_f32(a.to_f32() + b.to_f32())),
        ("add", "bf16") => combine!(bf16, |a, b| bf16::from_f32(a.to_f32() + b.to_f32())),
        ("add", "f32") => combine!(f32, |a, b| a + b),
        ("add", "f64") => combine!(f64, |a, b| a + b),
        ("min", "u32") => combine!(u32, u32::min),
        ("min", "s32") => combine!(i32, i32::min),
        ("min", "u64") => combine!(u64, u64::min),
        ("min", "s64") => combine!(i64, i64::min),
        ("max", "u32") => combine!(u32, u32::max),
        ("max", "s32") => combine!(i32, i32::max),
        ("max", "u64") => combine!(u64, u64::max),
        ("max", "s64") => combine!(i64, i64::max),
        ("and", "b32") => combine!(u32, |a, b| a & b),
        ("and", "b64") => combine!(u64, |a, b| a & b),
        ("or", "b32") => combine!(u32, |a, b| a | b),
        ("or", "b64") => combine!(u64, |a, b| a | b),
        ("xor", "b32") => combine!(u32, |a, b| a ^ b),
        ("xor", "b64") => combine!(u64, |a, b| a ^ b),
        _ => return Err(format!(".{operation} of {of_type}")),
    };
    Ok(CopyDirection::Reduce(combine))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::parse;

    /// Returns 16 bytes after the reduction.
    fn reduced(of: &str, there: [u8; 16], bytes: [u8; 16]) -> Result<[u8; 16], String> {
        let line = format!("cp.reduce.async.bulk.global.shared::cta.bulk_group.{of} [a], [b], 16;");
        let text = format!(
            ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k()\n{{\n{line}\n}}"
        );
        let module = parse(&text).map_err(|error| error.to_string())?;
        match combine(&module.kernels[0].body[0])? {
            CopyDirection::Reduce(with) => {
                let mut there = there;
                with(&mut there, &bytes);
                Ok(there)
            }
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn elements_are_combined_each_by_itself() {
        let four = |values: [i32; 4]| -> [u8; 16] {
            let bytes: Vec<_> = values.into_iter().flat_map(i32::to_le_bytes).collect();
            std::array::from_fn(|at| bytes[at])
        };
        let (a, b) = ([-1, 7, i32::MAX, 12], [3, -9, 1, 10]);
        for (of, wanted) in [
            ("add.u32", [2, -2, i32::MIN, 22]),
            ("min.s32", [-1, -9, 1, 10]),
            ("max.s32", [3, 7, i32::MAX, 12]),
            ("min.u32", [3, 7, 1, 10]),
            ("max.u32", [-1, -9, i32::MAX, 12]),
            ("and.b32", [3, 7, 1, 8]),
            ("or.b32", [-1, -9, i32::MAX, 14]),
            ("xor.b64", [-4, -16, i32::MAX - 1, 6]),
        ] {
            assert_eq!(reduced(of, four(a), four(b)), Ok(four(wanted)), "{of}");
        }
        let halves = |value: f32| [f16::from_f32(value).to_le_bytes(); 8].concat();
        let halves = |value| -> [u8; 16] { std::array::from_fn(|at| halves(value)[at]) };
        assert_eq!(
            reduced("add.noftz.f16", halves(1.5), halves(0.25)),
            Ok(halves(1.75))
        );
        let doubles = |value: f64| [value.to_le_bytes(); 2].concat();
        let doubles = |value| -> [u8; 16] { std::array::from_fn(|at| doubles(value)[at]) };
        assert_eq!(
            reduced("add.f64", doubles(1.5), doubles(0.25)),
            Ok(doubles(1.75))
        );
        assert!(reduced("min.f32", halves(0.0), halves(0.0)).is_err());
    }
}
