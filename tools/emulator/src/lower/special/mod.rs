//! Reciprocals, roots, and functions whose error PTX only bounds.
//!
//! They are computed in f64 and rounded to their type. The results are closer to the exact values than on a GPU, and
//! equal on each host.

#[cfg(test)]
mod tests;

use super::apply::{Form, map};
use super::bits;
use super::float::half::{Bf16, F16, Half, Modifiers as HalfFinish, step as half_step};
use super::float::single::{Modifiers, step};
use super::number::quick::{bits64, exp2};
use super::number::{ExactNumber, F32, F64, Format, Mode, exact};
use super::{Lowered, Scope};
use crate::machine::{Action, Kind, Source};
use crate::ptx::Instruction;

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let form = Form { instruction, scope };
    let action = match form.name() {
        "rcp" | "sqrt" if !form.has("approx") => rounded(form)?,
        "rcp" | "rsqrt" if form.of() == "f64" => coarse(form)?,
        "rcp" | "sqrt" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" => approximate(form)?,
        _ => return Ok(None),
    };
    Ok(Some((Kind::Special, action)))
}

/// Lowers `rcp.rn`, `sqrt.rz` and similar instructions.
fn rounded(form: Form<'_>) -> Result<Action, String> {
    let (of, root) = (form.of(), form.name() == "sqrt");
    let [rounding, ..] = form.instruction.modifiers.as_slice() else {
        return Err("its rounding is missing".into());
    };
    let mode = Mode::named(rounding).ok_or("its rounding is missing")?;
    let (out, sources, near) = (
        form.out(bits(of))?,
        form.sources([of])?,
        mode == Mode::Nearest,
    );
    if of == "f64" {
        form.only(1, &["rn", "rz", "rm", "rp"])?;
        return Ok(match (root, near) {
            (true, true) => map(out, sources, |[a]| bits64(f64::from_bits(a).sqrt())),
            (false, true) => map(out, sources, |[a]| bits64(1.0 / f64::from_bits(a))),
            _ => map(out, sources, move |[a]| directed(F64, a, root, mode)),
        });
    }
    form.only(1, &["rn", "rz", "rm", "rp", "ftz"])?;
    if of != "f32" {
        return Err(format!("unsupported type .{of}"));
    }
    let finish = finish(form);
    Ok(match (root, near) {
        (true, true) => step(out, sources, finish, |[a]| a.sqrt()),
        (false, true) => step(out, sources, finish, |[a]| 1.0 / a),
        _ => step(out, sources, finish, move |[a]| {
            f32::from_bits(directed(F32, a.to_bits().into(), root, mode) as u32)
        }),
    })
}

fn directed(format: Format, bits: u64, root: bool, mode: Mode) -> u64 {
    let number = format.decode(bits);
    let result = if root {
        exact::square_root(number)
    } else {
        exact::divide(ExactNumber::whole(1), number)
    };
    format.encode(result, mode, false)
}

fn finish(form: Form<'_>) -> Modifiers {
    Modifiers {
        ftz: form.has("ftz"),
        saturate: false,
    }
}

/// Lowers `rcp.approx.ftz.f64` and `rsqrt.approx.f64`, which compute the upper 32 bits from the upper 32 bits.
fn coarse(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["approx", "ftz"])?;
    let (ftz, root) = (form.has("ftz"), form.name() == "rsqrt");
    if !ftz && !root {
        return Err("it is for .ftz alone".into());
    }
    let (out, sources) = (form.out(64)?, form.sources(["f64"])?);
    Ok(map(out, sources, move |[a]| {
        let upper = |bits: u64| bits & !0xffff_ffff;
        let flushed = |bits: u64| match bits & 0x7ff0_0000_0000_0000 {
            0 if ftz => bits & 1 << 63,
            _ => bits,
        };
        // The bits that make a NaN may be only in the lower half.
        let number = f64::from_bits(a);
        if number.is_nan() {
            return bits64(number);
        }
        // Without `.ftz`, numbers whose set bits are all in the lower half are not zero.
        let number = f64::from_bits(if ftz { flushed(upper(a)) } else { a });
        let result = if root {
            1.0 / number.sqrt()
        } else {
            1.0 / number
        };
        flushed(upper(bits64(result)))
    }))
}

fn approximate(form: Form<'_>) -> Result<Action, String> {
    form.only(1, &["approx", "ftz"])?;
    if !form.has("approx") {
        return Err("it is for .approx alone".into());
    }
    match form.name() {
        "rcp" => of_type(form, |a| 1.0 / a),
        "sqrt" => of_type(form, f64::sqrt),
        "rsqrt" => of_type(form, |a| 1.0 / a.sqrt()),
        "ex2" => of_type(form, exp2),
        "lg2" => of_type(form, libm::log2),
        "sin" => of_type(form, libm::sin),
        "cos" => of_type(form, libm::cos),
        _ => of_type(form, libm::tanh),
    }
}

fn of_type(
    form: Form<'_>,
    function: impl Fn(f64) -> f64 + Send + Sync + 'static,
) -> Result<Action, String> {
    let (of, ftz) = (form.of(), form.has("ftz"));
    let halves = matches!(form.name(), "ex2" | "tanh");
    let sources: [Source; 1] = form.sources([of])?;
    let (out, pair) = (form.out(bits(of))?, of.ends_with("x2"));
    Ok(match of {
        "f32" if !(ftz && form.name() == "tanh") => step(out, sources, finish(form), move |[a]| {
            function(a.into()) as f32
        }),
        // `ex2` has subnormal results for f16, but not for bf16.
        "f16" | "f16x2" if halves && !ftz => half::<F16>(out, sources, pair, false, function),
        "bf16" | "bf16x2" if halves && ftz == (form.name() == "ex2") => {
            half::<Bf16>(out, sources, pair, ftz, function)
        }
        _ => return Err(format!("unsupported form for .{of}")),
    })
}

fn half<H: Half>(
    out: usize,
    sources: [Source; 1],
    pair: bool,
    ftz: bool,
    function: impl Fn(f64) -> f64 + Send + Sync + 'static,
) -> Action {
    let finish = HalfFinish {
        ftz,
        ..HalfFinish::default()
    };
    half_step::<H, 1>(out, sources, pair, finish, move |[a]| function(a))
}
