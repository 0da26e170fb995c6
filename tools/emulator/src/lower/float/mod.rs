//! Floating-point arithmetic, exact in every rounding mode.
//!
//! A NaN result is a fixed NaN of its type. PTX specifies `0x7fffffff` for f32 and `0x7fff` for f16 and bf16. For
//! f64, which PTX does not specify, it is `0xfff8000000000000`.

mod bits;
mod double;
pub(super) mod half;
pub(super) mod single;
#[cfg(test)]
mod tests;

use super::apply::Form;
use super::number::Mode;
use super::{Lowered, Scope};
use crate::machine::Kind;
use crate::ptx::Instruction;

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let form = Form { instruction, scope };
    let known = matches!(
        form.name(),
        "add" | "sub" | "mul" | "mad" | "fma" | "div" | "neg" | "abs" | "min" | "max"
    );
    let action = match (form.name(), form.of()) {
        ("copysign" | "testp", _) => bits::lower(form)?,
        ("neg" | "abs", _) => bits::sign(form)?,
        (_, "f32" | "f32x2") if known => single::lower(form)?,
        (_, "f64") if known => double::lower(form)?,
        (_, "f16" | "f16x2" | "bf16" | "bf16x2") if known => half::lower(form)?,
        _ => return Ok(None),
    };
    let kind = match form.name() {
        "div" => Kind::Special,
        _ => Kind::Float,
    };
    Ok(Some((kind, action)))
}

/// Returns the rounding mode of the instruction. The default is to nearest.
fn mode(form: Form<'_>) -> Mode {
    let modifiers = form.instruction.modifiers.iter();
    modifiers
        .filter_map(|modifier| Mode::named(modifier))
        .next()
        .unwrap_or(Mode::Nearest)
}

/// Defines the minimum or the maximum of two numbers. -0 is smaller than 0.
///
/// A number is preferred to a NaN, unless `nan` is true.
macro_rules! extreme {
    ($name:ident, $type:ident) => {
        #[inline(always)]
        fn $name(a: $type, b: $type, greater: bool, nan: bool) -> $type {
            let b_first = if a == b {
                // Equal numbers other than zeros have the same bits.
                a.is_sign_negative() == greater
            } else {
                (a < b) == greater
            };
            let lone = if a.is_nan() { b } else { a };
            match a.is_nan() | b.is_nan() {
                true if nan => $type::NAN,
                true => lone,
                false if b_first => b,
                false => a,
            }
        }
    };
}

use extreme;
