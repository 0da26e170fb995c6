//! Several short integers in one register.

use super::super::apply::{Form, map};
use crate::machine::Action;

/// Lowers `add.u16x2`, `min.s16x2` and similar instructions.
pub fn lower(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["relu"])?;
    let (relu, of) = (form.has("relu"), form.of());
    let (out, sources) = (form.out(32)?, form.sources(["b32"; 2])?);
    if relu && (of != "s16x2" || matches!(form.name(), "add" | "sub")) {
        return Err("unsupported modifier .relu".into());
    }
    macro_rules! halves {
        ($type:ident, $function:expr) => {
            map(out, sources, move |[a, b]| {
                let of = |number: u64, shift: u32| (number >> shift) as $type;
                let half = |shift| {
                    let result: $type = $function(of(a, shift), of(b, shift));
                    u64::from(result as u16) << shift
                };
                half(0) | half(16)
            })
        };
    }
    Ok(match (form.name(), of) {
        ("add", _) => halves!(u16, u16::wrapping_add),
        ("sub", _) => halves!(u16, u16::wrapping_sub),
        ("min", "u16x2") => halves!(u16, Ord::min),
        ("max", "u16x2") => halves!(u16, Ord::max),
        ("min", _) if relu => halves!(i16, |a: i16, b| a.min(b).max(0)),
        ("max", _) if relu => halves!(i16, |a: i16, b| a.max(b).max(0)),
        ("min", _) => halves!(i16, Ord::min),
        _ => halves!(i16, Ord::max),
    })
}

/// Lowers `dp4a` and `dp2a`: products of bytes with bytes or with halves, and a sum.
pub fn dot(form: Form<'_>) -> Result<Action, String> {
    let types: Vec<_> = form.instruction.modifiers.iter().collect();
    let signed = |of: &String| match of.as_str() {
        "u32" => Ok(false),
        "s32" => Ok(true),
        other => Err(format!("unsupported type .{other}")),
    };
    let (place, halves, first) = match (form.name(), types.as_slice()) {
        ("dp4a", [_, _]) => (0, false, 0),
        ("dp2a", [half, _, _]) if *half == "lo" => (1, true, 0),
        ("dp2a", [half, _, _]) if *half == "hi" => (1, true, 16),
        _ => return Err("its modifiers are not known".into()),
    };
    let (a_signed, b_signed) = (signed(types[place])?, signed(types[place + 1])?);
    let byte = |number: u64, shift: u32, signed: bool| {
        if signed {
            i32::from((number >> shift) as i8)
        } else {
            i32::from((number >> shift) as u8)
        }
    };
    let half = |number: u64, shift: u32, signed: bool| {
        if signed {
            i32::from((number >> shift) as i16)
        } else {
            i32::from((number >> shift) as u16)
        }
    };
    let sources = form.sources(["u32"; 3])?;
    Ok(map(form.out(32)?, sources, move |[a, b, c]| {
        let product = |index: u32| {
            if halves {
                half(a, 16 * index, a_signed) * byte(b, first + 8 * index, b_signed)
            } else {
                byte(a, 8 * index, a_signed) * byte(b, 8 * index, b_signed)
            }
        };
        let count = if halves { 2 } else { 4 };
        let sum = (0..count).fold(c as i32, |sum, index| sum.wrapping_add(product(index)));
        u64::from(sum as u32)
    }))
}
