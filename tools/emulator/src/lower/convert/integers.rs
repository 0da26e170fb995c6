//! Conversions to integers.

use super::super::apply::{Form, map};
use super::super::number::quick::flush;
use super::super::number::{F32, F64, Format, Mode};
use super::{How, Type};
use crate::machine::Action;

/// Returns the integer value of bits.
#[inline(always)]
pub fn value(number: u64, bits: u32, signed: bool) -> i128 {
    let up = 64 - bits;
    if signed {
        i128::from((number << up) as i64 >> up)
    } else {
        i128::from(number << up >> up)
    }
}

fn bounds(bits: u32, signed: bool) -> (i128, i128) {
    if signed {
        (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    } else {
        (0, (1 << bits) - 1)
    }
}

/// Returns the register of the result, and the mask of its width. A signed result is extended to this width.
fn extended(form: Form<'_>, bits: u32) -> Result<(usize, u64), String> {
    match form.scope.result(form.instruction)? {
        (index, width) if width >= bits && width <= 64 => Ok((index, u64::MAX >> (64 - width))),
        (_, width) => Err(format!("{bits} bits do not fit into {width}")),
    }
}

pub fn resize(form: Form<'_>, to: Type, from: Type, saturate: bool) -> Result<Action, String> {
    let (
        Type::Whole { bits, signed },
        Type::Whole {
            bits: own,
            signed: sign,
        },
    ) = (to, from)
    else {
        return Err("its types are no whole numbers".into());
    };
    let (out, ones) = extended(form, bits)?;
    let sources = form.sources([form.of()])?;
    if saturate {
        let (least, most) = bounds(bits, signed);
        return Ok(map(out, sources, move |[a]| {
            value(a, own, sign).clamp(least, most) as u64 & ones
        }));
    }
    let (up, own_up) = (64 - bits, 64 - own);
    let wide = move |a: u64| {
        if sign {
            ((a << own_up) as i64 >> own_up) as u64
        } else {
            a << own_up >> own_up
        }
    };
    Ok(if signed {
        map(out, sources, move |[a]| {
            ((wide(a) << up) as i64 >> up) as u64 & ones
        })
    } else {
        map(out, sources, move |[a]| wide(a) << up >> up)
    })
}

/// Converts from floating point. The result is clamped to the range of the type. NaN becomes 0. If the source or the
/// result has 64 bits, NaN becomes the highest bit alone.
pub fn from_float(
    form: Form<'_>,
    (bits, signed): (u32, bool),
    from: Format,
    how: How,
) -> Result<Action, String> {
    let mode = match how.mode {
        Some(mode) if how.whole => mode,
        _ => return Err("its rounding is missing".into()),
    };
    if how.finite || how.relu || how.ftz && from != F32 {
        return Err("its modifiers are not known".into());
    }
    let (out, ones) = extended(form, bits)?;
    let sources = form.sources([form.of()])?;
    let single = |bits: u64| f32::from_bits(bits as u32);
    match (bits, signed, mode) {
        (32, true, Mode::Zero) if from == F32 => {
            return Ok(map(out, sources, move |[a]| {
                u64::from(single(a) as i32 as u32)
            }));
        }
        (32, false, Mode::Zero) if from == F32 => {
            return Ok(map(out, sources, move |[a]| u64::from(single(a) as u32)));
        }
        _ => {}
    }
    let (least, most) = bounds(bits, signed);
    let nan = if from == F64 || bits == 64 {
        1 << (bits - 1)
    } else {
        0
    };
    Ok(map(out, sources, move |[a]| {
        let a = if how.ftz {
            flush(single(a)).to_bits().into()
        } else {
            a
        };
        let number = from.decode(a & from.ones());
        let number = number.to_whole(mode, least, most);
        number.map_or(nan, |number| number as u64 & ones)
    }))
}

/// Lowers `cvt.pack.sat.u8.s32.b32`: packs two numbers as short integers, below the earlier packed numbers.
pub fn pack(form: Form<'_>) -> Result<Action, String> {
    let types: Vec<_> = form
        .instruction
        .modifiers
        .iter()
        .map(String::as_str)
        .collect();
    let ("s32", to, with) = (match types.as_slice() {
        ["pack", "sat", to, from] => (*from, *to, false),
        ["pack", "sat", to, from, "b32"] => (*from, *to, true),
        _ => return Err("its modifiers are not known".into()),
    }) else {
        return Err("it is from s32 alone".into());
    };
    let (signed, bits) = to.split_at(1);
    let (signed, bits) = match (signed, bits, with) {
        ("u" | "s", "16", false) => (signed == "s", 16),
        ("u" | "s", "8", true) => (signed == "s", 8),
        ("u" | "s", "4", true) => (signed == "s", 4),
        ("u" | "s", "2", true) => (signed == "s", 2),
        _ => return Err(format!("unsupported type .{to}")),
    };
    let (least, most) = bounds(bits, signed);
    let short = move |a: u64| {
        let number = i128::from(a as i32).clamp(least, most);
        number as u64 & ((1 << bits) - 1)
    };
    let out = form.out(32)?;
    Ok(if with {
        map(
            out,
            form.sources(["s32", "s32", "b32"])?,
            move |[a, b, c]| (c << (2 * bits) | short(a) << bits | short(b)) & 0xffff_ffff,
        )
    } else {
        map(out, form.sources(["s32"; 2])?, move |[a, b]| {
            short(a) << bits | short(b)
        })
    })
}
