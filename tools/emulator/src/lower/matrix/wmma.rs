//! `wmma.load` and `wmma.store`: fragments from and to memory.
//!
//! The rows of a row-major matrix, or the columns of a column-major matrix, must be aligned to 16 bytes. CUDA
//! requires the same of the stride. The data move in pieces of 16 bytes.

use super::fragment::{MatrixRole, Shape, each};
use super::{only, registers};
use crate::lower::{Address, Scope, bits};
use crate::machine::{Block, Fault, LANES, Lanes, Mask, Source, Step, Warp, resolve};
use crate::ptx::{Instruction, Space};

/// The size of the largest matrix in bytes: 16x16 or 32x8 elements of f32.
const LARGEST: usize = 1024;

/// A matrix in memory, as given by an instruction.
struct Matrix {
    space: Space,
    address: Address,
    /// The number of elements from one line to the next. The default is the length of a line.
    stride: Option<Source>,
    /// The number of lines: rows, or columns of a column-major matrix.
    lines: usize,
    /// The length of a line in bytes.
    length: usize,
    /// The size of an element in bytes.
    element: usize,
    /// The byte offset of each element, by register, lane and part of a register. Offsets count line by line.
    places: Vec<u16>,
    registers: Vec<usize>,
}

/// Lowers `wmma.load.a`, `.b` and `.c`.
pub(super) fn load(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let role = match instruction.modifiers.get(1).map(String::as_str) {
        Some("a") => MatrixRole::A,
        Some("b") => MatrixRole::B,
        Some("c") => MatrixRole::Sum,
        other => return Err(format!("expected a fragment, found {other:?}")),
    };
    let matrix = matrix(instruction, scope, role, 0, 1)?;
    Ok(Box::new(move |warp, mask, block| {
        let mut bytes = [0; LARGEST];
        matrix.pass(
            warp,
            mask,
            block,
            false,
            |warp, block, lane, address, at, length| {
                block.read(
                    warp,
                    lane,
                    matrix.space,
                    address,
                    &mut bytes[at..at + length],
                )
            },
        )?;
        match matrix.element {
            1 => matrix.take::<1>(warp, &bytes),
            2 => matrix.take::<2>(warp, &bytes),
            4 => matrix.take::<4>(warp, &bytes),
            _ => matrix.take::<8>(warp, &bytes),
        }
        Ok(())
    }))
}

/// Lowers `wmma.store.d`.
pub(super) fn store(instruction: &Instruction, scope: &Scope<'_>) -> Result<Step, String> {
    let matrix = matrix(instruction, scope, MatrixRole::Sum, 1, 0)?;
    Ok(Box::new(move |warp, mask, block| {
        let mut bytes = [0; LARGEST];
        match matrix.element {
            2 => matrix.give::<2>(warp, &mut bytes),
            4 => matrix.give::<4>(warp, &mut bytes),
            _ => matrix.give::<8>(warp, &mut bytes),
        }
        matrix.pass(
            warp,
            mask,
            block,
            true,
            |warp, block, lane, address, at, length| {
                block.write(warp, lane, matrix.space, address, &bytes[at..at + length])
            },
        )
    }))
}

fn matrix(
    instruction: &Instruction,
    scope: &Scope<'_>,
    role: MatrixRole,
    list: usize,
    memory: usize,
) -> Result<Matrix, String> {
    let modifiers = || instruction.modifiers.iter().map(String::as_str);
    let of_type = modifiers().next_back().unwrap_or_default();
    let known: &[&str] = match (instruction.modifiers[0].as_str(), role) {
        ("load", MatrixRole::A | MatrixRole::B) => &["f16", "bf16", "tf32", "f64", "s8", "u8"],
        _ => &["f16", "f32", "f64", "s32"],
    };
    let text = modifiers()
        .find(|name| Shape::parse(name).is_some())
        .unwrap_or_default();
    let shapes: &[&str] = match (of_type, role) {
        ("tf32", _) => &["m16n16k8"],
        ("f64", _) => &["m8n8k4"],
        ("f32", _) => &["m16n16k16", "m32n8k16", "m8n32k16", "m16n16k8"],
        _ => &["m16n16k16", "m32n8k16", "m8n32k16"],
    };
    let shape = match Shape::parse(text) {
        Some(shape) if shapes.contains(&text) && known.contains(&of_type) => shape,
        _ => return Err(format!("no fragment of {of_type} has the shape {text}")),
    };
    let other = [
        "load", "store", "a", "b", "c", "d", "sync", "aligned", "row", "col",
    ];
    only(
        instruction,
        &[
            &[of_type, text],
            &other,
            &["global", "shared", "shared::cta"],
        ],
    )?;
    let space = match modifiers().find(|name| name.starts_with("shared") || *name == "global") {
        Some("global") => Space::Global,
        Some(_) => Space::Shared,
        None => Space::Generic,
    };
    let width = bits(of_type);
    let registers = registers(instruction, list)?;
    let wanted = match (of_type, role) {
        ("f16", MatrixRole::A | MatrixRole::B) => 8,
        _ => shape.registers(role, width),
    };
    if registers.len() != wanted {
        return Err(format!("{} registers, not {wanted}", registers.len()));
    }
    let by_rows = instruction.has("row");
    let (rows, columns) = shape.size(role);
    let (lines, length) = if by_rows {
        (rows, columns)
    } else {
        (columns, rows)
    };
    let element = width as usize / 8;
    let places = each(registers.len(), width).map(|(register, lane, part)| {
        let (row, column) = shape.place(role, width, register, lane, part);
        let (line, along) = if by_rows {
            (row, column)
        } else {
            (column, row)
        };
        ((line * length + along) * element) as u16
    });
    Ok(Matrix {
        space,
        address: scope.address(instruction, memory)?,
        stride: match instruction.operands.len() {
            3 => Some(scope.at(instruction, 2, "u32")?),
            _ => None,
        },
        lines,
        length: length * element,
        element,
        places: places.collect(),
        registers,
    })
}

impl Matrix {
    /// Calls `piece` for each piece of up to 16 bytes, and counts the piece. The arguments are a lane, an address,
    /// the offset in the matrix, and a length.
    fn pass(
        &self,
        warp: &mut Warp,
        mask: Mask,
        block: &mut Block<'_>,
        store: bool,
        mut piece: impl FnMut(&mut Warp, &mut Block<'_>, usize, u64, usize, usize) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let base = same(self.address.base.read(warp, block), "address")?;
        let base = base.wrapping_add_signed(self.address.offset);
        let stride = match self.stride {
            Some(stride) => {
                same(stride.read(warp, block), "stride")? as u32 as usize * self.element
            }
            None => self.length,
        };
        if !base.is_multiple_of(16) || !stride.is_multiple_of(16) {
            return Err(Fault::Undefined(format!(
                "a fragment of rows {stride} bytes apart at {base:#x}: both must be multiples of 16"
            )));
        }
        let size = self.length.min(16);
        let pieces = self.length / size;
        let mut addresses: Lanes = [0; LANES];
        let total = self.lines * pieces;
        for first in (0..total).step_by(LANES) {
            let count = LANES.min(total - first);
            for (lane, to) in addresses.iter_mut().enumerate().take(count) {
                let number = first + lane;
                let (line, along) = (number / pieces, number % pieces * size);
                let address = base + (line * stride + along) as u64;
                *to = address;
                piece(warp, block, lane, address, line * self.length + along, size)?;
            }
            let (space, _) = resolve(self.space, base);
            if space == Space::Shared {
                block.count_shared_bytes(count * size);
            }
            if space == Space::Global {
                let lanes = Mask(mask.0 & (u32::MAX >> (LANES - count)));
                block.count_global(&addresses, lanes, size, store);
            }
        }
        Ok(())
    }

    /// Writes the matrix to the registers.
    fn take<const SIZE: usize>(&self, warp: &mut Warp, bytes: &[u8; LARGEST]) {
        let per = const { if SIZE < 4 { 4 / SIZE } else { 1 } };
        let tables = self.places.chunks_exact(LANES * per);
        for (register, table) in self.registers.iter().zip(tables) {
            let lanes = warp.registers[*register].iter_mut();
            for (value, places) in lanes.zip(table.chunks_exact(per)) {
                *value = 0;
                for (part, place) in places.iter().enumerate() {
                    let mut element = [0; 8];
                    let at = usize::from(*place);
                    element[..SIZE].copy_from_slice(&bytes[at..at + SIZE]);
                    *value |= u64::from_le_bytes(element) << (part * SIZE * 8);
                }
            }
        }
    }

    /// Reads the matrix from the registers.
    fn give<const SIZE: usize>(&self, warp: &Warp, bytes: &mut [u8; LARGEST]) {
        let per = const { if SIZE < 4 { 4 / SIZE } else { 1 } };
        let tables = self.places.chunks_exact(LANES * per);
        for (register, table) in self.registers.iter().zip(tables) {
            let lanes = warp.registers[*register].iter();
            for (value, places) in lanes.zip(table.chunks_exact(per)) {
                for (part, place) in places.iter().enumerate() {
                    let element = (value >> (part * SIZE * 8)).to_le_bytes();
                    let at = usize::from(*place);
                    bytes[at..at + SIZE].copy_from_slice(&element[..SIZE]);
                }
            }
        }
    }
}

/// Checks that all lanes have the same value.
fn same(values: Lanes, what: &str) -> Result<u64, Fault> {
    if values.iter().all(|value| *value == values[0]) {
        Ok(values[0])
    } else {
        Err(Fault::Undefined(format!(
            "lanes give a fragment different {what}s"
        )))
    }
}
