//! Atomics and reductions in memory, executed lane by lane.
//!
//! `atom.add.f32` flushes subnormal numbers to zero in global memory and keeps them in shared memory, as the
//! specification states.

#[cfg(test)]
mod tests;

use half::{bf16, f16};

use super::memory::{addresses, fetch, keep, put, space};
use super::{Address, Lowered, Scope, Target, bits};
use crate::machine::resolve;
use crate::machine::{Access, Action, Kind, LANES, Source, Step};
use crate::ptx::{Instruction, Operand, Space};

/// A function of the old value and two operands.
type MbarrierOp = fn(u64, u64, u64) -> u64;

const OPERATIONS: &[&str] = &[
    "add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec",
];

const IGNORED: &[&str] = &[
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "noftz",
    "global",
    "shared",
    "shared::cta",
    "shared::cluster",
    "L2::cache_hint",
];

const TYPES: &[&str] = &[
    "b16", "b32", "b64", "b128", "u32", "u64", "s32", "s64", "f16", "f16x2", "bf16", "bf16x2",
    "f32", "f64",
];

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let returns = match instruction.name.as_str() {
        "atom" => true,
        "red" if !instruction.has("async") => false,
        _ => return Ok(None),
    };
    let (mut operation, mut of_type, mut count) = (None, None, 1);
    for word in instruction.modifiers.iter().map(String::as_str) {
        match word {
            "v2" | "v4" | "v8" => count = word[1..].parse().unwrap_or(1),
            _ if OPERATIONS.contains(&word) => operation = Some(word),
            _ if TYPES.contains(&word) => of_type = Some(word),
            _ if IGNORED.contains(&word) => {}
            _ => return Err(format!(".{word} is not known here")),
        }
    }
    let operation = operation.ok_or("it does nothing")?;
    let of_type = of_type.ok_or("it has no type")?;
    let first = usize::from(returns);
    let address = scope.address(instruction, first)?;
    let atomic = Atomic {
        space: space(instruction),
        address,
        width: bits(of_type) as usize / 8,
        count,
    };
    let results = match returns {
        true => parts(instruction.operands.first(), count)?
            .iter()
            .map(|operand| scope.target(operand))
            .collect::<Result<_, _>>()?,
        false => vec![Target::Sink; count],
    };
    let operand = |place: usize| -> Result<Vec<Source>, String> {
        let parts = parts(instruction.operands.get(first + place), count)?;
        parts
            .iter()
            .map(|part| scope.source(part, of_type))
            .collect()
    };
    let second = operand(1)?;
    let third = match operation {
        "cas" => operand(2)?,
        _ => vec![Source::Value(0); count],
    };
    let step = match atomic.width {
        16 => atomic.wide(operation, &results, &second, &third)?,
        _ => {
            let change = |in_global| {
                let found = change(operation, of_type, in_global);
                found.ok_or_else(|| format!(".{operation} of .{of_type} is not known here"))
            };
            atomic.step([change(false)?, change(true)?], &results, second, third)?
        }
    };
    Ok(Some((Kind::Atomic, Action::Step(step))))
}

fn parts(operand: Option<&Operand>, count: usize) -> Result<&[Operand], String> {
    let parts = match operand {
        Some(Operand::Vector(parts)) => parts.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    if parts.len() == count {
        Ok(parts)
    } else {
        Err(format!("{} elements are not {count}", parts.len()))
    }
}

struct Atomic {
    space: Space,
    address: Address,
    /// The size of an element in bytes.
    width: usize,
    count: usize,
}

impl Atomic {
    /// Returns the step. `changes` contains the functions for shared memory and for global memory.
    fn step(
        self,
        changes: [MbarrierOp; 2],
        results: &[Target],
        second: Vec<Source>,
        third: Vec<Source>,
    ) -> Result<Step, String> {
        let results: Vec<_> = results
            .iter()
            .map(|result| match result {
                Target::Data(index, width) => Ok(Some((*index, keep(*width)))),
                Target::Sink => Ok(None),
                Target::Predicate(_) => Err("a predicate cannot be loaded".to_owned()),
            })
            .collect::<Result<_, _>>()?;
        let Self {
            space,
            address,
            width,
            count,
        } = self;
        Ok(Box::new(move |warp, mask, block| {
            let mut at = [0; LANES];
            addresses(address, warp, block, &mut at);
            let mut there = at;
            block.reach(warp, mask, space, &mut there, width * count, Access::Atomic)?;
            block.counts.atomics += (mask.count() * count) as u64;
            let mut given = [[(0, 0); 8]; LANES];
            for place in 0..count {
                let second = second[place].read(warp, block);
                let third = third[place].read(warp, block);
                (0..LANES).for_each(|lane| given[lane][place] = (second[lane], third[lane]));
            }
            for lane in mask.lanes() {
                let in_global = resolve(space, at[lane]).0 == Space::Global;
                let change = changes[usize::from(in_global)];
                for place in 0..count {
                    let (second, third) = given[lane][place];
                    // SAFETY: `reach` has checked all bytes of this lane.
                    let old = unsafe {
                        let there = (there[lane] as *mut u8).add(place * width);
                        let change = |old| change(old, second, third);
                        match width {
                            2 => update::<2>(there, change),
                            4 => update::<4>(there, change),
                            _ => update::<8>(there, change),
                        }
                    };
                    if let Some((index, keep)) = results[place] {
                        warp.registers[index][lane] = old & keep;
                    }
                }
            }
            Ok(())
        }))
    }

    /// Returns the step for `exch` and `cas` of 128 bits. Each value is in two registers.
    fn wide(
        self,
        operation: &str,
        results: &[Target],
        second: &[Source],
        third: &[Source],
    ) -> Result<Step, String> {
        let swaps = operation == "cas";
        let result = match results {
            [Target::Data(index, 128)] => Some(*index),
            [Target::Sink] => None,
            _ => return Err("the result has not 128 bits".into()),
        };
        let (second, third) = match (second, third, operation) {
            ([Source::Register(second)], [Source::Register(third)], "cas") => (*second, *third),
            ([Source::Register(second)], _, "exch") => (*second, *second),
            _ => return Err("128 bits are only exchanged, from registers".into()),
        };
        let Self { space, address, .. } = self;
        Ok(Box::new(move |warp, mask, block| {
            let mut there = [0; LANES];
            addresses(address, warp, block, &mut there);
            block.reach(warp, mask, space, &mut there, 16, Access::Atomic)?;
            block.counts.atomics += mask.count() as u64;
            for lane in mask.lanes() {
                let pair =
                    |index: usize| [warp.registers[index][lane], warp.registers[index + 1][lane]];
                let (second, third) = (pair(second), pair(third));
                // SAFETY: `reach` has checked all bytes of this lane.
                let old = unsafe {
                    let there = there[lane] as *mut u8;
                    let halves = [there, there.add(8)];
                    let old = halves.map(|half| fetch::<8>(half));
                    if !swaps || old == second {
                        put::<8>(halves[0], third[0]);
                        put::<8>(halves[1], third[1]);
                    }
                    old
                };
                if let Some(index) = result {
                    warp.registers[index][lane] = old[0];
                    warp.registers[index + 1][lane] = old[1];
                }
            }
            Ok(())
        }))
    }
}

/// Changes the value at an address, and returns the old value.
///
/// # Safety
///
/// `there` must be valid for writing `W` bytes.
unsafe fn update<const W: usize>(there: *mut u8, change: impl Fn(u64) -> u64) -> u64 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let old = fetch::<W>(there);
        put::<W>(there, change(old));
        old
    }
}

fn change(operation: &str, of_type: &str, in_global: bool) -> Option<MbarrierOp> {
    let narrow = bits(of_type) == 32;
    Some(match (operation, of_type) {
        ("exch", "b32" | "b64" | "u32" | "s32" | "u64" | "s64" | "f32" | "f64") => |_, b, _| b,
        ("cas", "b16") => |a, b, c| if a == b & 0xffff { c } else { a },
        ("cas", "b32" | "u32" | "s32") => |a, b, c| if a == b & 0xffff_ffff { c } else { a },
        ("cas", "b64" | "u64" | "s64") => |a, b, c| if a == b { c } else { a },
        ("and", _) if of_type.starts_with('b') => |a, b, _| a & b,
        ("or", _) if of_type.starts_with('b') => |a, b, _| a | b,
        ("xor", _) if of_type.starts_with('b') => |a, b, _| a ^ b,
        ("add", "u32" | "s32" | "u64" | "s64") => |a, b, _| a.wrapping_add(b),
        ("inc", "u32") => |a, b, _| if a >= b { 0 } else { a + 1 },
        ("dec", "u32") => |a, b, _| if a == 0 || a > b { b } else { a - 1 },
        ("min", "u32" | "u64") => |a, b, _| a.min(b),
        ("max", "u32" | "u64") => |a, b, _| a.max(b),
        ("min", "s32") if narrow => |a, b, _| (a as i32).min(b as i32) as u64,
        ("max", "s32") => |a, b, _| (a as i32).max(b as i32) as u64,
        ("min", "s64") => |a, b, _| (a as i64).min(b as i64) as u64,
        ("max", "s64") => |a, b, _| (a as i64).max(b as i64) as u64,
        ("add", "f32") if in_global => |a, b, _| {
            let sum = single(flushed(a)) + single(flushed(b));
            flushed(canonical(sum))
        },
        ("add", "f32") => |a, b, _| canonical(single(a) + single(b)),
        ("add", "f64") => |a, b, _| (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
        ("add", "f16") => |a, b, _| half_add(a as u16, b as u16).into(),
        ("add", "bf16") => |a, b, _| brain_add(a as u16, b as u16).into(),
        ("add", "f16x2") => |a, b, _| both(a, b, half_add),
        ("add", "bf16x2") => |a, b, _| both(a, b, brain_add),
        ("min", "f16") => |a, b, _| half_min(a as u16, b as u16).into(),
        ("max", "f16") => |a, b, _| half_max(a as u16, b as u16).into(),
        ("min", "bf16") => |a, b, _| brain_min(a as u16, b as u16).into(),
        ("max", "bf16") => |a, b, _| brain_max(a as u16, b as u16).into(),
        ("min", "f16x2") => |a, b, _| both(a, b, half_min),
        ("max", "f16x2") => |a, b, _| both(a, b, half_max),
        ("min", "bf16x2") => |a, b, _| both(a, b, brain_min),
        ("max", "bf16x2") => |a, b, _| both(a, b, brain_max),
        _ => return None,
    })
}

fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn canonical(value: f32) -> u64 {
    let bits = if value.is_nan() {
        0x7fff_ffff
    } else {
        value.to_bits()
    };
    bits.into()
}

/// Replaces a subnormal number with a zero of the same sign.
fn flushed(bits: u64) -> u64 {
    match bits & 0x7f80_0000 {
        0 => bits & 0x8000_0000,
        _ => bits,
    }
}

// An f32 has more than twice the digits, so rounding twice equals rounding once.

fn half_add(a: u16, b: u16) -> u16 {
    let sum = f16::from_bits(a).to_f32() + f16::from_bits(b).to_f32();
    if sum.is_nan() {
        0x7fff
    } else {
        f16::from_f32(sum).to_bits()
    }
}

fn brain_add(a: u16, b: u16) -> u16 {
    let sum = bf16::from_bits(a).to_f32() + bf16::from_bits(b).to_f32();
    if sum.is_nan() {
        0x7fff
    } else {
        bf16::from_f32(sum).to_bits()
    }
}

fn half_min(a: u16, b: u16) -> u16 {
    least(a, b, 0x7c00, 0)
}

fn half_max(a: u16, b: u16) -> u16 {
    least(a, b, 0x7c00, 0xffff)
}

fn brain_min(a: u16, b: u16) -> u16 {
    least(a, b, 0x7f80, 0)
}

fn brain_max(a: u16, b: u16) -> u16 {
    least(a, b, 0x7f80, 0xffff)
}

/// Returns the smaller value, where -0 is smaller than 0. Returns the larger value if all bits of `turned` are set. A
/// number is preferred to a NaN, whose bits are above `infinity`.
fn least(a: u16, b: u16, infinity: u16, turned: u16) -> u16 {
    let nan = |bits: u16| bits & 0x7fff > infinity;
    // The rank ascends with the numbers.
    let rank = |bits: u16| {
        turned
            ^ if bits >> 15 == 1 {
                !bits
            } else {
                bits | 0x8000
            }
    };
    match (nan(a), nan(b)) {
        (true, true) => 0x7fff,
        (true, false) => b,
        (false, true) => a,
        _ if rank(b) < rank(a) => b,
        _ => a,
    }
}

fn both(a: u64, b: u64, each: fn(u16, u16) -> u16) -> u64 {
    let low = each(a as u16, b as u16);
    let high = each((a >> 16) as u16, (b >> 16) as u16);
    u64::from(high) << 16 | u64::from(low)
}
