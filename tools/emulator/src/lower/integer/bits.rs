//! Bit operations: logic, shifts, fields, permutations.

use super::super::apply::{Form, map, predicate_bits, store_predicate};
use super::whole::{Whole, by_type};
use crate::machine::{Action, Source};

pub fn lower(form: Form<'_>) -> Result<Action, String> {
    match form.name() {
        "and" | "or" | "xor" | "not" if form.of() == "pred" => predicates(form),
        "and" | "or" | "xor" | "not" | "cnot" => logic(form),
        "shl" | "shr" => shift(form),
        "shf" => funnel(form),
        "lop3" => lop3(form),
        "popc" | "clz" | "brev" | "bfind" => count(form),
        "prmt" => prmt(form),
        _ => field(form),
    }
}

fn predicates(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &[])?;
    let [Some(out), None] = form.predicates_out()? else {
        return Err("there is one result".into());
    };
    let a = form.predicate(1)?;
    let name = form.name();
    if form.instruction.operands.len() != if name == "not" { 2 } else { 3 } {
        return Err("its operands are too few or too many".into());
    }
    let b = if name == "not" { a } else { form.predicate(2)? };
    macro_rules! step {
        ($function:expr) => {
            Action::Step(Box::new(move |warp, mask, _| {
                let [a, b] = [a, b].map(|one| predicate_bits(one, warp));
                store_predicate(warp, out, $function(a, b), mask);
                Ok(())
            }))
        };
    }
    Ok(match name {
        "and" => step!(|a: u32, b: u32| a & b),
        "or" => step!(|a: u32, b: u32| a | b),
        "xor" => step!(|a: u32, b: u32| a ^ b),
        _ => step!(|a: u32, _| !a),
    })
}

fn width(of: &str) -> Result<u32, String> {
    match of {
        "b16" | "u16" | "s16" => Ok(16),
        "b32" | "u32" | "s32" => Ok(32),
        "b64" | "u64" | "s64" => Ok(64),
        _ => Err(format!("unsupported type .{of}")),
    }
}

fn logic(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &[])?;
    let of = form.of();
    let bits = width(of)?;
    let (out, ones) = (form.out(bits)?, u64::MAX >> (64 - bits));
    Ok(match form.name() {
        "and" => map(out, form.sources([of; 2])?, move |[a, b]| a & b & ones),
        "or" => map(out, form.sources([of; 2])?, move |[a, b]| (a | b) & ones),
        "xor" => map(out, form.sources([of; 2])?, move |[a, b]| (a ^ b) & ones),
        "not" => map(out, form.sources([of])?, move |[a]| !a & ones),
        _ => map(out, form.sources([of])?, move |[a]| {
            u64::from(a & ones == 0)
        }),
    })
}

/// Lowers shifts. A shift by the width or more leaves only copies of the sign, or zeros.
fn shift(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &[])?;
    let of = form.of();
    let bits = width(of)?;
    let (out, ones) = (form.out(bits)?, u64::MAX >> (64 - bits));
    let sources = form.sources([of, "u32"])?;
    if form.name() == "shl" {
        return Ok(map(out, sources, move |[a, by]| {
            let by = by as u32;
            let shifted = a << (by & 63) & ones;
            if by < bits { shifted } else { 0 }
        }));
    }
    by_type!(of, T => Ok(map(out, sources, |[a, by]| T::of(a).shr(by as u32).bits())))
}

/// Lowers funnel shifts: one half of two registers that are shifted together.
fn funnel(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["l", "r", "wrap", "clamp"])?;
    let (left, clamp) = (form.has("l"), form.has("clamp"));
    if form.of() != "b32" || left == form.has("r") || clamp == form.has("wrap") {
        return Err("its modifiers are not known".into());
    }
    let sources = form.sources(["b32"; 3])?;
    Ok(map(form.out(32)?, sources, move |[low, high, by]| {
        let both = high << 32 | low & 0xffff_ffff;
        let by = if clamp {
            (by as u32).min(32)
        } else {
            by as u32 & 31
        };
        let shifted = if left { both << by >> 32 } else { both >> by };
        shifted & 0xffff_ffff
    }))
}

/// Lowers `lop3`: any function of three bits, given by its truth table.
fn lop3(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &[])?;
    if form.of() != "b32" {
        return Err("it is for b32 alone".into());
    }
    let [a, b, c, table] = form.sources(["b32"; 4])?;
    let Source::Value(table) = table else {
        return Err("expected a number as the lookup table".into());
    };
    let rows: [u64; 8] = std::array::from_fn(|row| 0u64.wrapping_sub(table >> row & 1));
    Ok(map(form.out(32)?, [a, b, c], move |[a, b, c]| {
        let of_c = |row: usize| rows[row] & !c | rows[row + 1] & c;
        let of_b = |row: usize| of_c(row) & !b | of_c(row + 2) & b;
        (of_b(0) & !a | of_b(4) & a) & 0xffff_ffff
    }))
}

fn count(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    let bits = width(of)?;
    if bits == 16 {
        return Err(format!("unsupported type .{of}"));
    }
    let amount = form.has("shiftamt");
    form.only(
        1,
        if form.name() == "bfind" {
            &["shiftamt"]
        } else {
            &[]
        },
    )?;
    let sources = form.sources([of])?;
    let ones = u64::MAX >> (64 - bits);
    let spare = 64 - bits;
    let signed = of.starts_with('s');
    Ok(match form.name() {
        "popc" => map(form.out(32)?, sources, move |[a]| {
            (a & ones).count_ones().into()
        }),
        "clz" => map(form.out(32)?, sources, move |[a]| {
            u64::from((a & ones).leading_zeros() - spare)
        }),
        "brev" => map(form.out(bits)?, sources, move |[a]| {
            a.reverse_bits() >> spare
        }),
        _ => map(form.out(32)?, sources, move |[a]| {
            // The highest bit that differs from the sign, or all ones if there is none.
            let negative = signed && a >> (bits - 1) & 1 == 1;
            match if negative { !a } else { a } & ones {
                0 => 0xffff_ffff,
                set if amount => u64::from(bits - 1 - set.ilog2()),
                set => set.ilog2().into(),
            }
        }),
    })
}

/// Lowers `bfe`, `bfi`, `szext` and `bmsk`.
fn field(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    let bits = width(of)?;
    let out = form.out(bits)?;
    let (signed, clamp) = (of.starts_with('s'), form.has("clamp"));
    let ones = |count: u32| u64::MAX.checked_shr(64 - count.min(64)).unwrap_or(0);
    match form.name() {
        "bfe" | "bfi" if bits == 16 => return Err(format!("unsupported type .{of}")),
        "bfe" | "bfi" => form.only(1, &[])?,
        _ if clamp == form.has("wrap") || bits != 32 => {
            return Err("its modifiers are not known".into());
        }
        _ => form.only(1, &["clamp", "wrap"])?,
    }
    // Sign-extends a number of `length` bits.
    let extend = move |number: u64, length: u32, negative: bool| {
        if negative {
            (number | !ones(length)) & ones(bits)
        } else {
            number
        }
    };
    let within = move |by: u64| {
        if clamp {
            (by as u32).min(32)
        } else {
            by as u32 & 31
        }
    };
    Ok(match form.name() {
        "bfe" => map(
            out,
            form.sources([of, "u32", "u32"])?,
            move |[a, start, length]| {
                let (start, length) = (start as u32 & 0xff, length as u32 & 0xff);
                let sign = (start + length).saturating_sub(1).min(bits - 1);
                let negative = signed && length > 0 && a >> sign & 1 == 1;
                let here = a.checked_shr(start).unwrap_or(0) & ones(length);
                let there = length.min(bits.saturating_sub(start));
                extend(here & ones(there), there, negative)
            },
        ),
        "bfi" => {
            let sources = form.sources([of, of, "u32", "u32"])?;
            map(out, sources, move |[a, b, start, length]| {
                let (start, length) = (start as u32 & 0xff, length as u32 & 0xff);
                let up = |number: u64| number.checked_shl(start).unwrap_or(0);
                let mask = up(ones(length)) & ones(bits);
                b & !mask | up(a) & mask
            })
        }
        "szext" => map(out, form.sources([of, "u32"])?, move |[a, length]| {
            let length = within(length);
            let negative = signed && length > 0 && a >> (length - 1) & 1 == 1;
            extend(a & ones(length), length, negative)
        }),
        _ => map(out, form.sources(["u32"; 2])?, move |[start, length]| {
            let (start, length) = (within(start), within(length));
            ones(length) << start & ones(32)
        }),
    })
}

/// Lowers `prmt`, which selects bytes of two registers.
fn prmt(form: Form<'_>) -> Result<Action, String> {
    let modes = ["f4e", "b4e", "rc8", "ecl", "ecr", "rc16"];
    let mode = match form.instruction.modifiers.as_slice() {
        [of] if of == "b32" => None,
        [of, mode] if of == "b32" => Some(mode.as_str()),
        _ => return Err("its modifiers are not known".into()),
    };
    if mode.is_some_and(|mode| !modes.contains(&mode)) {
        return Err("its mode is not known".into());
    }
    let sources = form.sources(["b32"; 3])?;
    let out = form.out(32)?;
    macro_rules! permuted {
        ($chosen:expr) => {
            map(out, sources, |[a, b, choice]| {
                let chosen: fn(u32, u32) -> u32 = $chosen;
                let both = b << 32 | a & 0xffff_ffff;
                (0..4).fold(0, |all, place| {
                    let index = chosen(choice as u32, place);
                    let byte = both >> (8 * (index & 7)) & 0xff;
                    // If the highest bit of a selector is set, the sign of the byte is replicated.
                    let sign = if byte & 0x80 == 0 { 0 } else { 0xff };
                    let byte = if index & 8 == 0 { byte } else { sign };
                    all | byte << (8 * place)
                })
            })
        };
    }
    Ok(match mode {
        None => permuted!(|choice, place| choice >> (4 * place)),
        Some("f4e") => permuted!(|choice, place| (choice & 3) + place),
        Some("b4e") => permuted!(|choice, place| ((choice & 3) + 8 - place) & 7),
        Some("rc8") => permuted!(|choice, _| choice & 3),
        Some("ecl") => permuted!(|choice, place| place.max(choice & 3)),
        Some("ecr") => permuted!(|choice, place| place.min(choice & 3)),
        _ => permuted!(|choice, place| (choice & 1) * 2 + (place & 1)),
    })
}
