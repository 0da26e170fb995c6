//! Matrix products of tensor cores, and their fragments.
//!
//! The emulator computes a product exactly and rounds only at the end. It sums the accumulator and then the products
//! along `k` in f64, and rounds once to the type of `D`. A sum in f64 loses bits only if terms differ by more than
//! about 2^27. A GPU aligns the terms to the largest term and cuts off bits a few positions below f32. It does not
//! specify the order. The result of a GPU is within a few units in the last place of the result here. Products in f64
//! are chains of fused multiply-adds along `k`.

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

/// Returns an action that the whole warp executes together.
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

/// Returns the registers of a list or of a single operand.
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

/// Refuses modifiers that are in none of the lists.
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
