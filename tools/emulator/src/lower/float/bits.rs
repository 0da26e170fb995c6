//! Instructions without arithmetic: signs and classes.

use super::super::apply::{Form, map, store_predicate, test};
use super::super::bits;
use super::super::number::quick::flush;
use crate::machine::Action;

/// Returns the sign bits of a type.
fn signs(of: &str) -> Result<u64, String> {
    Ok(match of {
        "f32" => 1 << 31,
        "f64" => 1 << 63,
        "f16" | "bf16" => 1 << 15,
        "f16x2" | "bf16x2" => 1 << 31 | 1 << 15,
        _ => return Err(format!("unsupported type .{of}")),
    })
}

/// Lowers `neg` and `abs`.
pub fn sign(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["ftz"])?;
    let of = form.of();
    let signs = signs(of)?;
    let (out, sources) = (form.out(bits(of))?, form.sources([of])?);
    let (negates, ftz) = (form.name() == "neg", form.has("ftz"));
    // Keeps only the sign of a subnormal number.
    let flushed = move |bits: u64| match signs {
        0x8000_8000 => flushed_half(bits >> 16) << 16 | flushed_half(bits & 0xffff),
        0x8000 => flushed_half(bits),
        _ => flush(f32::from_bits(bits as u32)).to_bits().into(),
    };
    if ftz && matches!(of, "f64" | "bf16" | "bf16x2") {
        return Err(format!(".{of} has no .ftz"));
    }
    Ok(match (negates, ftz) {
        (true, false) => map(out, sources, move |[a]| a ^ signs),
        (false, false) => map(out, sources, move |[a]| a & !signs),
        (true, true) => map(out, sources, move |[a]| flushed(a) ^ signs),
        (false, true) => map(out, sources, move |[a]| flushed(a) & !signs),
    })
}

fn flushed_half(bits: u64) -> u64 {
    if bits & 0x7c00 == 0 {
        bits & 0x8000
    } else {
        bits
    }
}

/// Lowers `copysign` and `testp`.
pub fn lower(form: Form<'_>) -> Result<Action, String> {
    let of = form.of();
    if !matches!(of, "f32" | "f64") {
        return Err(format!("unsupported type .{of}"));
    }
    if form.name() == "testp" {
        return testp(form);
    }
    form.only(1, &[])?;
    let sign = signs(of)?;
    // The sign of the first operand, and the magnitude of the second operand.
    let sources = form.sources([of; 2])?;
    Ok(map(form.out(bits(of))?, sources, move |[a, b]| {
        a & sign | b & !sign
    }))
}

fn testp(form: Form<'_>) -> Result<Action, String> {
    let [Some(out), None] = form.predicates_out()? else {
        return Err("there is one result".into());
    };
    let (of, sources) = (form.of(), form.sources([form.of()])?);
    let (sign, infinite, normal) = match of {
        "f32" => (1 << 31, 0x7f80_0000, 0x0080_0000),
        _ => (1 << 63, 0x7ff0_0000_0000_0000, 0x0010_0000_0000_0000),
    };
    let [which, _] = form.instruction.modifiers.as_slice() else {
        return Err("its modifiers are not known".into());
    };
    // The range of codes without signs for which the test holds: the first code, and the code after the last one.
    let (from, to): (u64, u64) = match which.as_str() {
        "finite" => (0, infinite),
        "infinite" => (infinite, infinite + 1),
        "number" => (0, infinite + 1),
        "notanumber" => (infinite + 1, u64::MAX),
        "normal" => (normal, infinite),
        "subnormal" => (1, normal),
        _ => return Err(format!(".{which} is not known here")),
    };
    Ok(test(
        sources,
        move |[a]| (from..to).contains(&(a & !sign)),
        move |warp, bits, mask| store_predicate(warp, out, bits, mask),
    ))
}
