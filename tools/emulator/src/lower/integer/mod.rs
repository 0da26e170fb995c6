//! Integers, bits, comparisons, selections.

mod arithmetic;
mod bits;
mod carry;
mod choose;
mod compare;
mod packed;
#[cfg(test)]
mod tests;
mod whole;

use super::apply::Form;
use super::{Lowered, Scope};
use crate::machine::Kind;
use crate::ptx::Instruction;

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    // NVRTC writes `max.relu.s32` as `max.s32.relu`.
    if let [of, relu] = instruction.modifiers.as_slice()
        && relu == "relu"
        && of != "relu"
    {
        let mut ordered = instruction.clone();
        ordered.modifiers.swap(0, 1);
        return lower(&ordered, scope);
    }
    let form = Form { instruction, scope };
    let action = match form.name() {
        "add" | "sub" | "mad" if form.has("cc") => carry::lower(form)?,
        "addc" | "subc" | "madc" => carry::lower(form)?,
        "add" | "sub" | "min" | "max" if matches!(form.of(), "u16x2" | "s16x2") => {
            packed::lower(form)?
        }
        "add" | "sub" | "mul" | "mad" | "div" | "rem" | "neg" | "abs" | "min" | "max"
            if !whole::is(form.of()) =>
        {
            return Ok(None);
        }
        "add" | "sub" | "mul" | "mad" | "div" | "rem" | "neg" | "abs" | "min" | "max" | "sad"
        | "mul24" | "mad24" => arithmetic::lower(form)?,
        "dp4a" | "dp2a" => packed::dot(form)?,
        "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "shf" | "lop3" | "popc" | "clz"
        | "brev" | "bfind" | "bfe" | "bfi" | "prmt" | "szext" | "bmsk" => bits::lower(form)?,
        "setp" => compare::setp(form)?,
        "set" => compare::set(form)?,
        "selp" | "slct" => choose::lower(form)?,
        _ => return Ok(None),
    };
    Ok(Some((Kind::Integer, action)))
}
