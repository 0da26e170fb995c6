//! Conversions between types.
//!
//! A NaN result is the NaN of its type. Only the conversion from bf16 to f32 keeps the bits of a NaN, since the
//! formats differ only in length.

mod integers;
mod packed;
#[cfg(test)]
mod tests;

use super::apply::{Form, map};
use super::float::single::saturated;
use super::number::quick::{bits, bits64, flush, from_bf16, from_f16, to_bf16, to_f16};
use super::number::{BF16, ExactNumber, F16, F32, F64, Format, Mode, TF32};
use super::{Lowered, Scope};
use crate::machine::{Action, Kind, Source};
use crate::ptx::Instruction;

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let form = Form { instruction, scope };
    if form.name() != "cvt" {
        return Ok(None);
    }
    let action = if form.has("pack") {
        integers::pack(form)?
    } else {
        convert(form)?
    };
    Ok(Some((Kind::Convert, action)))
}

/// A type of a single number.
#[derive(Clone, Copy, PartialEq)]
enum Type {
    Whole { bits: u32, signed: bool },
    Float(Format),
}

impl Type {
    fn named(name: &str) -> Option<Self> {
        let whole = |bits, signed| Self::Whole { bits, signed };
        Some(match name {
            "u8" => whole(8, false),
            "u16" => whole(16, false),
            "u32" => whole(32, false),
            "u64" => whole(64, false),
            "s8" => whole(8, true),
            "s16" => whole(16, true),
            "s32" => whole(32, true),
            "s64" => whole(64, true),
            "f16" => Self::Float(F16),
            "bf16" => Self::Float(BF16),
            "f32" => Self::Float(F32),
            // Stored in the upper bits of 32 bits.
            "tf32" => Self::Float(TF32),
            "f64" => Self::Float(F64),
            _ => return None,
        })
    }
}

/// The requests of the modifiers.
#[derive(Clone, Copy)]
struct How {
    /// The rounding mode, or `None` without one. Nothing is rounded then.
    mode: Option<Mode>,
    /// Round a floating-point number to an integer of the same type.
    whole: bool,
    ftz: bool,
    /// Clamp to [0, 1], or to the range of an integer type.
    saturate: bool,
    /// Use the largest number instead of infinity.
    finite: bool,
    relu: bool,
}

impl How {
    fn of(form: Form<'_>) -> Result<Self, String> {
        let modifiers = &form.instruction.modifiers;
        let mut how = Self {
            mode: None,
            whole: false,
            ftz: false,
            saturate: false,
            finite: false,
            relu: false,
        };
        for modifier in &modifiers[..modifiers.len() - 2] {
            match (modifier.as_str(), Mode::named(modifier)) {
                (name, Some(mode)) => {
                    how.mode = Some(mode);
                    how.whole = name.ends_with('i');
                }
                ("ftz", _) => how.ftz = true,
                ("sat", _) => how.saturate = true,
                ("satfinite", _) => how.finite = true,
                ("relu", _) => how.relu = true,
                _ => return Err(format!(".{modifier} is not known here")),
            }
        }
        Ok(how)
    }

    fn plain(self) -> bool {
        !(self.whole | self.ftz | self.saturate | self.finite | self.relu)
    }
}

fn convert(form: Form<'_>) -> Result<Action, String> {
    let modifiers = &form.instruction.modifiers;
    let [.., to, from] = modifiers.as_slice() else {
        return Err("its types are missing".into());
    };
    let how = How::of(form)?;
    let (Some(target), Some(source)) = (Type::named(to), Type::named(from)) else {
        return packed::lower(form, how, to, from);
    };
    let sources = form.sources([from.as_str()])?;
    match (target, source) {
        (Type::Whole { .. }, Type::Whole { .. }) => {
            if how.mode.is_some() || how.ftz || how.finite || how.relu {
                return Err("nothing is to be rounded here".into());
            }
            integers::resize(form, target, source, how.saturate)
        }
        (Type::Whole { bits, signed }, Type::Float(format)) => {
            integers::from_float(form, (bits, signed), format, how)
        }
        (Type::Float(format), Type::Whole { bits, signed }) => {
            let mode = how.mode.ok_or("its rounding is missing")?;
            let out = form.out(format.length())?;
            Ok(match (to.as_str(), from.as_str(), mode) {
                ("f32", "s32", Mode::Nearest) if how.plain() => {
                    map(out, sources, |[a]| (a as i32 as f32).to_bits().into())
                }
                ("f32", "u32", Mode::Nearest) if how.plain() => {
                    map(out, sources, |[a]| (a as u32 as f32).to_bits().into())
                }
                _ => map(out, sources, move |[a]| {
                    let number = ExactNumber::whole(integers::value(a, bits, signed));
                    finished(number, format, how, mode)
                }),
            })
        }
        (Type::Float(to), Type::Float(from)) => float(form, sources, to, from, how),
    }
}

fn float(
    form: Form<'_>,
    sources: [Source; 1],
    to: Format,
    from: Format,
    how: How,
) -> Result<Action, String> {
    let loses = to.fraction < from.fraction || to.exponent < from.exponent;
    if from == TF32 || loses && how.mode.is_none() {
        return Err("its rounding is missing".into());
    }
    let mode = how.mode.unwrap_or(Mode::Nearest);
    let out = form.out(if to == TF32 { 32 } else { to.length() })?;
    let near = mode == Mode::Nearest && how.plain();
    let single = |bits: u64| f32::from_bits(bits as u32);
    Ok(match (to, from) {
        (F32, F16) if near => map(out, sources, |[a]| from_f16(a).to_bits().into()),
        (F32, BF16) if near => map(out, sources, |[a]| from_bf16(a).to_bits().into()),
        (F16, F32) if near => map(out, sources, move |[a]| to_f16(single(a))),
        (BF16, F32) if near => map(out, sources, move |[a]| to_bf16(single(a))),
        (F64, F32) if near => map(out, sources, move |[a]| bits64(single(a).into())),
        (F32, F64) if near => map(out, sources, |[a]| bits(f64::from_bits(a) as f32)),
        (F32, F32) if !(how.whole | how.finite | how.relu) => {
            let (ftz, saturate) = (how.ftz, how.saturate);
            map(out, sources, move |[a]| {
                let number = if ftz { flush(single(a)) } else { single(a) };
                bits(if saturate { saturated(number) } else { number })
            })
        }
        _ => map(out, sources, move |[a]| {
            let flushed = how.ftz && from == F32;
            let a = if flushed { bits(flush(single(a))) } else { a };
            finished(from.decode(a & from.ones()), to, how, mode)
        }),
    })
}

/// Rounds a number, and applies the other modifiers.
fn finished(number: ExactNumber, to: Format, how: How, mode: Mode) -> u64 {
    let zero = ExactNumber::whole(0);
    let number = if how.whole {
        number.rounded(mode)
    } else {
        number
    };
    let number = match number {
        ExactNumber::Nan if how.saturate => zero,
        ExactNumber::Nan if to == TF32 => return 0x7fff_ffff,
        _ if (how.saturate || how.relu) && number.negative() => zero,
        _ => number,
    };
    let code = to.encode(number, mode, how.finite);
    let one = ((1 << (to.exponent - 1)) - 1) << to.fraction;
    let code = if how.saturate && code > one {
        one
    } else {
        code
    };
    match to {
        F32 if how.ftz => bits(flush(f32::from_bits(code as u32))),
        TF32 => code << 13,
        _ => code,
    }
}
