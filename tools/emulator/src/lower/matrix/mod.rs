//! Products by matrix units, and their fragments.
//!
//! A product is exact here up to its end: the products of two elements and their sum, the
//! accumulator first and then along `k`, are formed in f64 and rounded once to the type of `D`. (A
//! sum in f64 can lose bits only where terms are more than about 2^27 apart.) A GPU aligns the
//! terms to the largest, cuts off what lies some bits below f32, and says nothing of the order; its
//! result is within a few units in the last place of the one here. Products in f64 are chains of
//! fused multiply-adds, along `k`.

mod element;
mod fragment;
mod product;
mod rows;
#[cfg(test)]
mod tests;
mod wmma;

use super::{Lowered, Scope};
use crate::machine::{Action, Fault, Kind, Mask, Source, Step};
use crate::ptx::{Instruction, Operand, Register};

pub(super) fn lower(instruction: &Instruction, scope: &Scope<'_>) -> Lowered {
    let step = match (instruction.name.as_str(), instruction.modifiers.first()) {
        ("wmma", Some(first)) => match first.as_str() {
            "load" => wmma::load(instruction, scope)?,
            "store" => wmma::store(instruction, scope)?,
            "mma" => product::product(instruction)?,
            _ => return Ok(None),
        },
        ("mma", Some(first)) if first == "sync" => product::product(instruction)?,
        ("ldmatrix", _) => rows::load(instruction, scope)?,
        ("stmatrix", _) => rows::store(instruction, scope)?,
        ("movmatrix", _) => rows::transpose(instruction, scope)?,
        _ => return Ok(None),
    };
    Ok(Some((Kind::Matrix, together(step))))
}

/// A step that a whole warp takes.
fn together(step: Step) -> Action {
    Action::Meet {
        members: Source::Value(u32::MAX.into()),
        step: Box::new(move |warp, mask, block| match mask {
            Mask::ALL => step(warp, mask, block),
            _ => Err(Fault::Undefined(format!(
                "a matrix unit needs 32 lanes, and here are {:#010x}",
                mask.0
            ))),
        }),
    }
}

/// The numbers of the registers in a list, or of one by itself.
fn registers(instruction: &Instruction, place: usize) -> Result<Vec<usize>, String> {
    let number = |operand: &Operand| match operand {
        Operand::Register(Register::Data { index, .. }) => Ok(*index),
        other => Err(format!("expected a data register, found {other:?}")),
    };
    match instruction.operands.get(place) {
        Some(Operand::Vector(parts)) => parts.iter().map(number).collect(),
        Some(other) => Ok(vec![number(other)?]),
        None => Err(format!("operand {place} is missing")),
    }
}

/// Refuses modifiers that none of the lists has.
fn only(instruction: &Instruction, known: &[&[&str]]) -> Result<(), String> {
    let is_known = |modifier: &&String| known.iter().any(|list| list.contains(&modifier.as_str()));
    match instruction
        .modifiers
        .iter()
        .find(|modifier| !is_known(modifier))
    {
        Some(modifier) => Err(format!(".{modifier} is not known here")),
        None => Ok(()),
    }
}
