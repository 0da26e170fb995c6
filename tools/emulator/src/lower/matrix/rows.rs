//! `ldmatrix`, `stmatrix` and `movmatrix`: matrices of 8 by 8 halves.
//!
//! Lane `l` holds the halves `2 (l % 4)` and `2 (l % 4) + 1` of row `l / 4`, or of column `l / 4` if the matrix is
//! transposed. Lane `8 i + row` provides the address of a row of matrix `i`.

use super::{only, registers};
use crate::lower::Scope;
use crate::machine::{Block, Fault, LANES, Lanes, Mask, Step, Warp, resolve};
use crate::ptx::{Instruction, Space};

/// The size of a row in bytes.
const ROW: usize = 16;

/// A matrix of 8 rows.
type Rows = [[u8; ROW]; 8];

/// Lowers `ldmatrix`.
pub(super) fn load(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let (registers, transposed) = form(instruction, 0)?;
    let (space, address) = (space(instruction), scope.address(instruction, 1)?);
    Ok(Box::new(move |warp, _, block| {
        let addresses = rows(address.base.read(warp, block), address.offset);
        for (number, register) in registers.iter().enumerate() {
            let mut matrix = Rows::default();
            for (row, bytes) in matrix.iter_mut().enumerate() {
                let lane = 8 * number + row;
                in_shared(space, lane, addresses[lane])?;
                block.read(warp, lane, space, addresses[lane], bytes)?;
            }
            count(block, &addresses, number);
            warp.registers[*register] = give(&matrix, transposed);
        }
        Ok(())
    }))
}

/// Lowers `stmatrix`.
pub(super) fn store(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let (registers, transposed) = form(instruction, 1)?;
    let (space, address) = (space(instruction), scope.address(instruction, 0)?);
    Ok(Box::new(
        move |warp: &mut Warp, _: Mask, block: &mut Block<'_>| {
            let addresses = rows(address.base.read(warp, block), address.offset);
            for (number, register) in registers.iter().enumerate() {
                let matrix = take(&warp.registers[*register], transposed);
                for (row, bytes) in matrix.iter().enumerate() {
                    let lane = 8 * number + row;
                    in_shared(space, lane, addresses[lane])?;
                    block.write(warp, lane, space, addresses[lane], bytes)?;
                }
                count(block, &addresses, number);
            }
            Ok(())
        },
    ))
}

/// Lowers `movmatrix`.
pub(super) fn transpose(instruction: &Instruction, _scope: &Scope<'_>) -> Result<Step, String> {
    only(instruction, &[&["sync", "aligned", "m8n8", "trans", "b16"]])?;
    let (target, source) = (registers(instruction, 0)?, registers(instruction, 1)?);
    match (&target[..], &source[..]) {
        (&[target], &[source]) => Ok(Box::new(move |warp, _, _| {
            warp.registers[target] = give(&take(&warp.registers[source], false), true);
            Ok(())
        })),
        _ => Err("movmatrix has one register each".into()),
    }
}

/// Returns the registers in the operand list, and whether the matrices are transposed.
fn form(instruction: &Instruction, list: usize) -> Result<(Vec<usize>, bool), String> {
    let counts = [("x1", 1), ("x2", 2), ("x4", 4)];
    let known = ["sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "b16"];
    only(instruction, &[&known, &["shared", "shared::cta"]])?;
    let registers = registers(instruction, list)?;
    let count = counts.iter().find(|(name, _)| instruction.has(name));
    match count {
        Some((_, count)) if *count == registers.len() => Ok((registers, instruction.has("trans"))),
        _ => Err(format!("{} registers", registers.len())),
    }
}

fn space(instruction: &Instruction) -> Space {
    let shared = instruction
        .modifiers
        .iter()
        .any(|name| name.starts_with("shared"));
    if shared {
        Space::Shared
    } else {
        Space::Generic
    }
}

fn rows(base: Lanes, offset: i64) -> Lanes {
    base.map(|address| address.wrapping_add_signed(offset))
}

fn in_shared(space: Space, lane: usize, address: u64) -> Result<(), Fault> {
    match resolve(space, address) {
        (Space::Shared, _) => Ok(()),
        (other, _) => Err(Fault::Undefined(format!(
            "lane {lane} names a row at {address:#x} of {other:?} memory, not of shared memory"
        ))),
    }
}

/// Counts the rows of a matrix, which are accessed together.
fn count(block: &mut Block<'_>, addresses: &Lanes, number: usize) {
    block.count_shared(addresses, Mask(0xff << (8 * number)), ROW);
}

/// Returns the lanes' values of a matrix.
fn give(matrix: &Rows, transposed: bool) -> Lanes {
    let half = |row: usize, column: usize| {
        u64::from(u16::from_le_bytes([
            matrix[row][2 * column],
            matrix[row][2 * column + 1],
        ]))
    };
    std::array::from_fn(|lane| {
        let (group, first) = (lane / 4, lane % 4 * 2);
        if transposed {
            half(first, group) | half(first + 1, group) << 16
        } else {
            half(group, first) | half(group, first + 1) << 16
        }
    })
}

/// Returns the matrix that the lanes hold.
fn take(lanes: &Lanes, transposed: bool) -> Rows {
    let mut matrix = Rows::default();
    for (lane, value) in lanes.iter().enumerate().take(LANES) {
        let (group, first) = (lane / 4, lane % 4 * 2);
        let bytes = value.to_le_bytes();
        for part in 0..2 {
            let (row, column) = if transposed {
                (first + part, group)
            } else {
                (group, first + part)
            };
            matrix[row][2 * column..2 * column + 2].copy_from_slice(&bytes[2 * part..2 * part + 2]);
        }
    }
    matrix
}
