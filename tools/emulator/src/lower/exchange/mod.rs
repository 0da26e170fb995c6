//! Data exchange between the lanes of a warp.

#[cfg(test)]
mod tests;

use super::{Lowered, Scope, Target, memory::keep};
use crate::machine::{Action, Block, Fault, Kind, LANES, Lanes, Mask, Source, Step, Warp};
use crate::ptx::{Instruction, Operand, Register};

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let (members, step) = match instruction.name.as_str() {
        "shfl" => (4, shuffle(instruction, scope)?),
        "vote" => (2, vote(instruction, scope)?),
        "match" => (2, matches(instruction, scope)?),
        "redux" => (2, reduce(instruction, scope)?),
        "elect" => (1, elect(instruction, scope)?),
        "activemask" => (1, active(instruction, scope)?),
        _ => return Ok(None),
    };
    let action = if instruction.has("sync") {
        Action::Meet {
            members: scope.at(instruction, members, "u32")?,
            step,
        }
    } else {
        // The step runs with the lanes that are at this instruction.
        Action::Step(step)
    };
    Ok(Some((Kind::Lanes, action)))
}

/// Returns the number of a predicate, and whether it is negated. The constants 0 and 1 have no number.
pub(super) fn predicate(operand: &Operand) -> Result<(Option<usize>, bool), String> {
    match operand {
        Operand::Register(Register::Predicate(index)) => Ok((Some(*index), false)),
        Operand::Not(index) => Ok((Some(*index), true)),
        Operand::Integer(number) => Ok((None, *number != 0)),
        other => Err(format!("expected a predicate, found {other:?}")),
    }
}

/// A 32-bit result with an optional predicate: `d|p`.
#[derive(Clone, Copy)]
struct Results {
    data: Option<(usize, u64)>,
    predicate: Option<usize>,
}

impl Results {
    fn of(instruction: &Instruction, scope: &Scope<'_>) -> Result<Self, String> {
        let mut results = Self {
            data: None,
            predicate: None,
        };
        let operand = instruction
            .operands
            .first()
            .ok_or("no destination operand")?;
        let (first, second) = match operand {
            Operand::Pair(first, second) => (&**first, Some(&**second)),
            one => (one, None),
        };
        for operand in [Some(first), second].into_iter().flatten() {
            match scope.target(operand)? {
                Target::Data(index, width) => results.data = Some((index, keep(width))),
                Target::Predicate(index) => results.predicate = Some(index),
                Target::Sink => {}
            }
        }
        Ok(results)
    }

    fn write(self, warp: &mut Warp, mask: Mask, values: &Lanes, predicates: u32) {
        if let Some((index, keep)) = self.data {
            let register = &mut warp.registers[index];
            match mask {
                Mask::ALL => (0..LANES).for_each(|lane| register[lane] = values[lane] & keep),
                _ => mask
                    .lanes()
                    .for_each(|lane| register[lane] = values[lane] & keep),
            }
        }
        if let Some(index) = self.predicate {
            let bits = &mut warp.predicates[index];
            *bits = *bits & !mask.0 | predicates & mask.0;
        }
    }
}

fn shuffle(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    let [value, by, limits] = [
        scope.at(instruction, 1, "b32")?,
        scope.at(instruction, 2, "b32")?,
        scope.at(instruction, 3, "b32")?,
    ];
    // Returns the lane to read from, and whether this lane is in the segment. The arguments are a lane, the first and
    // the last lane of its segment, the operand, and the bits that number segments.
    type Choose = fn(u32, u32, u32, u32, u32) -> (u32, bool);
    let modes: [(&str, Choose); 4] = [
        ("up", |lane, _, last, by, _| {
            let from = lane.wrapping_sub(by);
            (from, from as i32 >= last as i32)
        }),
        ("down", |lane, _, last, by, _| {
            (lane + by, lane + by <= last)
        }),
        ("bfly", |lane, _, last, by, _| {
            (lane ^ by, lane ^ by <= last)
        }),
        ("idx", |_, first, last, by, segments| {
            let from = first | by & !segments;
            (from, from <= last)
        }),
    ];
    let mode = modes.iter().find(|(name, _)| instruction.has(name));
    let choose = mode.ok_or("its mode is not known")?.1;
    Ok(Box::new(move |warp, mask, block| {
        let values = value.read(warp, block);
        let (by, limits) = (by.read(warp, block), limits.read(warp, block));
        let (mut out, mut inside) = ([0; LANES], 0);
        for lane in mask.lanes() {
            let (clamp, segments) = (limits[lane] as u32 & 31, limits[lane] as u32 >> 8 & 31);
            let first = lane as u32 & segments;
            let last = first | clamp & !segments;
            let (from, within) = choose(lane as u32, first, last, by[lane] as u32 & 31, segments);
            let from = if within { from as usize } else { lane };
            if !mask.has(from) {
                return Err(Fault::Undefined(format!(
                    "lane {lane} reads from lane {from}, which is not among {:#010x}",
                    mask.0
                )));
            }
            out[lane] = values[from];
            inside |= u32::from(within) << lane;
        }
        results.write(warp, mask, &out, inside);
        Ok(())
    }))
}

fn vote(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    let operand = instruction.operands.get(1).ok_or("it votes on nothing")?;
    let (index, negated) = predicate(operand)?;
    // The arguments are the lanes whose predicate is true, and all lanes.
    type Decide = fn(u32, u32) -> bool;
    let modes: [(&str, Decide); 4] = [
        ("all", |ayes, all| ayes == all),
        ("any", |ayes, _| ayes != 0),
        ("uni", |ayes, all| ayes == all || ayes == 0),
        ("ballot", |_, _| false),
    ];
    let mode = modes.iter().find(|(name, _)| instruction.has(name));
    let decide = mode.ok_or("its mode is not known")?.1;
    Ok(Box::new(move |warp, mask, _| {
        let bits = index.map_or(0, |index| warp.predicates[index]);
        let ayes = mask.0 & if negated { !bits } else { bits };
        let decided = if decide(ayes, mask.0) { u32::MAX } else { 0 };
        results.write(warp, mask, &[ayes.into(); LANES], decided);
        Ok(())
    }))
}

fn matches(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    let value = scope.at(instruction, 1, "b64")?;
    let same = |values: &Lanes, mask: Mask, lane: usize| {
        let same = mask.lanes().filter(|other| values[*other] == values[lane]);
        same.fold(0u32, |all, other| all | 1 << other)
    };
    match (instruction.has("any"), instruction.has("all")) {
        (true, false) => Ok(Box::new(move |warp, mask, block| {
            let (values, mut out) = (value.read(warp, block), [0; LANES]);
            for lane in mask.lanes() {
                out[lane] = same(&values, mask, lane).into();
            }
            results.write(warp, mask, &out, 0);
            Ok(())
        })),
        (false, true) => Ok(Box::new(move |warp, mask, block| {
            let values = value.read(warp, block);
            let first = mask.0.trailing_zeros() as usize;
            let all = same(&values, mask, first) == mask.0;
            let (found, decided) = if all { (mask.0, u32::MAX) } else { (0, 0) };
            results.write(warp, mask, &[found.into(); LANES], decided);
            Ok(())
        })),
        _ => Err("its mode is not known".into()),
    }
}

fn reduce(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    let has = |name| instruction.has(name);
    let value = scope.at(instruction, 1, "b32")?;
    let operation = ["add", "min", "max", "and", "or", "xor"]
        .into_iter()
        .find(|name| has(name));
    let of_type = ["u32", "s32", "b32", "f32"]
        .into_iter()
        .find(|name| has(name));
    if let (Some(operation @ ("min" | "max")), Some("f32")) = (operation, of_type) {
        return Ok(reduce_floats(
            value,
            results,
            operation == "max",
            has("abs"),
            has("NaN"),
        ));
    }
    let merge: fn(u32, u32) -> u32 = match (operation, of_type) {
        (Some("add"), Some("u32" | "s32")) => u32::wrapping_add,
        (Some("min"), Some("u32")) => |a, b| a.min(b),
        (Some("max"), Some("u32")) => |a, b| a.max(b),
        (Some("min"), Some("s32")) => |a, b| (a as i32).min(b as i32) as u32,
        (Some("max"), Some("s32")) => |a, b| (a as i32).max(b as i32) as u32,
        (Some("and"), Some("b32")) => |a, b| a & b,
        (Some("or"), Some("b32")) => |a, b| a | b,
        (Some("xor"), Some("b32")) => |a, b| a ^ b,
        _ => return Err("is not known here".into()),
    };
    Ok(Box::new(move |warp, mask, block| {
        let values = value.read(warp, block);
        let merged = mask.lanes().map(|lane| values[lane] as u32).reduce(merge);
        results.write(warp, mask, &[merged.unwrap_or_default().into(); LANES], 0);
        Ok(())
    }))
}

/// Reduces floats. Numbers are preferred to NaNs unless NaNs are requested. -0 is smaller than 0.
fn reduce_floats(value: Source, results: Results, greatest: bool, abs: bool, nan: bool) -> Step {
    const NAN: u32 = 0x7fff_ffff;
    let is_nan = |bits: u32| bits & NAN > 0x7f80_0000;
    let rank = move |bits: u32| {
        let ascending = if bits >> 31 == 1 {
            !bits
        } else {
            bits | 1 << 31
        };
        if greatest { !ascending } else { ascending }
    };
    Box::new(move |warp, mask, block: &mut Block<'_>| {
        let values = value.read(warp, block);
        let bits = |lane: usize| values[lane] as u32 & if abs { NAN } else { u32::MAX };
        let numbers = mask.lanes().map(bits).filter(|bits| !is_nan(*bits));
        let poisoned = nan && mask.lanes().any(|lane| is_nan(bits(lane)));
        let found = if poisoned {
            NAN
        } else {
            numbers.min_by_key(|bits| rank(*bits)).unwrap_or(NAN)
        };
        results.write(warp, mask, &[found.into(); LANES], 0);
        Ok(())
    })
}

/// Elects the lowest lane.
fn elect(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    Ok(Box::new(move |warp, mask, _| {
        let leader = mask.0.trailing_zeros();
        results.write(warp, mask, &[leader.into(); LANES], 1 << leader);
        Ok(())
    }))
}

/// Returns the lanes that execute this instruction together.
fn active(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let results = Results::of(instruction, scope)?;
    Ok(Box::new(move |warp, mask, _| {
        results.write(warp, mask, &[mask.0.into(); LANES], 0);
        Ok(())
    }))
}
