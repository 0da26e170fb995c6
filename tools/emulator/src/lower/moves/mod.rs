//! Moves between registers and parts of registers, and conversions of addresses between spaces.

#[cfg(test)]
mod tests;

use super::apply::{Form, Inputs, map, predicate_bits, store, store_predicate, test};
use super::{Lowered, Scope, bits, generic};
use crate::machine::{Action, Kind, LANES, Source};
use crate::memory::WINDOW;
use crate::ptx::{Instruction, Operand, Register, Space};

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let form = Form { instruction, scope };
    let action = match form.name() {
        "mov" => mov(form)?,
        "cvta" => between_spaces(form)?,
        "isspacep" => is_space(form)?,
        _ => return Ok(None),
    };
    Ok(Some((Kind::Move, action)))
}

fn mov(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    form.only(1, &[])?;
    if form.instruction.operands.len() != 2 {
        return Err("it has two operands".into());
    }
    match (of, form.operand(0)?, form.operand(1)?) {
        ("pred", ..) => predicate(form),
        (_, Operand::Vector(parts), _) => apart(form, parts),
        (_, _, Operand::Vector(parts)) => together(form, parts),
        (_, _, Operand::Generic(name)) => {
            let (space, address) = form.scope.symbol(name)?;
            Ok(constant(form.out(64)?, generic(space, address)))
        }
        ("b128", Operand::Register(_), Operand::Register(_)) => {
            let [out, from] = [pair(form, 0)?, pair(form, 1)?];
            Ok(Action::Step(Box::new(move |warp, mask, _| {
                for half in 0..2 {
                    let lanes = warp.registers[from + half];
                    store(warp, out + half, &lanes, mask);
                }
                Ok(())
            })))
        }
        _ => {
            let known = [
                "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
            ];
            if !known.contains(&of) {
                return Err(format!("unsupported type .{of}"));
            }
            let ones = u64::MAX >> (64 - bits(of));
            let source = form.source(1, of)?;
            Ok(map(form.out(bits(of))?, [source], move |[a]| a & ones))
        }
    }
}

fn constant(out: usize, value: u64) -> Action {
    map(out, [Source::Value(value)], |[a]| a)
}

fn predicate(form: Form<'_>) -> Result<Action, String> {
    let [Some(out), None] = form.predicates_out()? else {
        return Err("there is one result".into());
    };
    let from = form.predicate(1)?;
    Ok(Action::Step(Box::new(move |warp, mask, _| {
        let bits = predicate_bits(from, warp);
        store_predicate(warp, out, bits, mask);
        Ok(())
    })))
}

/// Returns the first of the two registers that hold 128 bits.
fn pair(form: Form<'_>, place: usize) -> Result<usize, String> {
    match form.operand(place)? {
        Operand::Register(Register::Data { index, width: 128 }) => Ok(*index),
        other => Err(format!("{other:?} has no 128 bits")),
    }
}

/// Returns the number of bits of each of `count` parts. The first part is the lowest.
fn part(of: &str, count: usize) -> Result<u32, String> {
    let whole = bits(of);
    match (of, count) {
        ("b16", 2) | ("b32" | "b64" | "b128", 2 | 4) => Ok(whole / count as u32),
        _ => Err(format!(".{of} has no {count} parts")),
    }
}

/// Lowers `mov.b32 {a, b}, r`.
fn apart(form: Form<'_>, parts: &[Operand]) -> Result<Action, String> {
    let of = form.of();
    let width = part(of, parts.len())?;
    let out = |part: &Operand| match part {
        Operand::Sink => Ok(None),
        Operand::Register(Register::Data { index, width: own }) if *own >= width => {
            Ok(Some(*index))
        }
        other => Err(format!("{other:?} cannot hold {width} bits")),
    };
    let outs: Vec<_> = parts.iter().map(out).collect::<Result<_, _>>()?;
    let words = match of {
        "b128" => {
            let first = pair(form, 1)?;
            vec![Source::Register(first), Source::Register(first + 1)]
        }
        _ => vec![form.source(1, of)?],
    };
    let words: Vec<_> = words.into_iter().map(|word| Inputs::of([word])).collect();
    let ones = u64::MAX >> (64 - width);
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        // Copies the lanes, since a part may be a register that is read.
        let mut lanes = [[0; LANES]; 2];
        for (lanes, word) in lanes.iter_mut().zip(&words) {
            let mut room = None;
            let [word] = word.view(warp, block, &mut room);
            *lanes = *word;
        }
        for (place, out) in outs.iter().enumerate() {
            if let Some(out) = out {
                let at = place as u32 * width;
                let word = &lanes[(at / 64) as usize];
                store(warp, *out, &word.map(|word| word >> (at % 64) & ones), mask);
            }
        }
        Ok(())
    })))
}

/// Lowers `mov.b32 r, {a, b}`.
fn together(form: Form<'_>, parts: &[Operand]) -> Result<Action, String> {
    let of = form.of();
    let width = part(of, parts.len())?;
    let out = match of {
        "b128" => pair(form, 0)?,
        _ => form.out(bits(of))?,
    };
    let kind = format!("b{width}");
    let input = |part| Ok(Inputs::of([form.scope.source(part, &kind)?]));
    let inputs: Vec<_> = parts.iter().map(input).collect::<Result<_, String>>()?;
    let ones = u64::MAX >> (64 - width);
    let words = if of == "b128" { 2 } else { 1 };
    Ok(Action::Step(Box::new(move |warp, mask, block| {
        let mut lanes = [[0; LANES]; 2];
        for (place, input) in inputs.iter().enumerate() {
            let at = place as u32 * width;
            let word = &mut lanes[(at / 64) as usize];
            let mut room = None;
            let [part] = input.view(warp, block, &mut room);
            for (word, part) in word.iter_mut().zip(part.iter()) {
                *word |= (part & ones) << (at % 64);
            }
        }
        for (place, lanes) in lanes[..words].iter().enumerate() {
            store(warp, out + place, lanes, mask);
        }
        Ok(())
    })))
}

/// Returns the space of a modifier such as `shared::cta`.
fn space(modifier: &str) -> Result<Space, String> {
    Ok(match modifier.split("::").next().unwrap_or(modifier) {
        "global" => Space::Global,
        "const" => Space::Constant,
        "shared" => Space::Shared,
        "local" => Space::Local,
        "param" => Space::Parameter,
        _ => return Err(format!("unsupported state space .{modifier}")),
    })
}

/// Lowers `cvta.shared.u64`, and the opposite direction `cvta.to.shared.u64`.
fn between_spaces(form: Form<'_>) -> Result<Action, String> {
    let modifiers: Vec<_> = form
        .instruction
        .modifiers
        .iter()
        .map(String::as_str)
        .collect();
    let (to, name) = match modifiers.as_slice() {
        ["to", name, "u64"] => (true, *name),
        [name, "u64"] => (false, *name),
        _ => return Err("its modifiers are not known".into()),
    };
    let (out, sources) = (form.out(64)?, form.sources(["u64"])?);
    let first = generic(space(name)?, 0);
    Ok(if to {
        map(out, sources, move |[a]| a.wrapping_sub(first))
    } else {
        map(out, sources, move |[a]| a.wrapping_add(first))
    })
}

/// Lowers `isspacep`, which tests whether a generic address lies in a space. An address in no other space is global,
/// including constants.
fn is_space(form: Form<'_>) -> Result<Action, String> {
    let [Some(out), None] = form.predicates_out()? else {
        return Err("there is one result".into());
    };
    let [name] = form.instruction.modifiers.as_slice() else {
        return Err("its modifiers are not known".into());
    };
    let sources = form.sources(["u64"])?;
    let in_window = |space, address: u64| address.wrapping_sub(generic(space, 0)) < WINDOW;
    let then = move |warp: &mut _, bits, mask| store_predicate(warp, out, bits, mask);
    Ok(match space(name)? {
        Space::Constant => return Err("unsupported: isspacep of constant memory".into()),
        Space::Global => {
            let others = [Space::Shared, Space::Local, Space::Parameter];
            let inside = move |[a]: [u64; 1]| {
                let mut others = others.into_iter().filter(|other| generic(*other, 0) != 0);
                !others.any(|other| in_window(other, a))
            };
            test(sources, inside, then)
        }
        space => test(sources, move |[a]| in_window(space, a), then),
    })
}
