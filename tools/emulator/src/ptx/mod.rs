//! Parses PTX text. The parser handles only the form of an instruction. [`lower`](crate::lower) interprets it.
//!
//! Source: NVIDIA, *Parallel Thread Execution ISA*, version 8.8.

mod cursor;
mod declare;
mod lex;
mod operand;
mod parse;
mod scope;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;

pub use parse::parse;

/// The content of a PTX file.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// The target, such as `sm_90a`.
    pub target: String,
    /// The variables outside of kernels: `.global`, `.const` and `.shared`.
    pub variables: Vec<Variable>,
    /// The kernels: all `.entry` functions.
    pub kernels: Vec<Kernel>,
}

/// A kernel: an `.entry` function.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// The name.
    pub name: String,
    /// The parameters, in order.
    pub parameters: Vec<Variable>,
    /// The kind and the number of each register, by name. Registers of inner braces are not included.
    pub registers: HashMap<String, Register>,
    /// The numbers of data registers and of predicates.
    pub counts: (usize, usize),
    /// The `.local` and `.shared` variables of the body.
    pub variables: Vec<Variable>,
    /// The instructions, in order.
    pub body: Vec<Instruction>,
    /// The index of the instruction at each label. The name of a label in inner braces is followed by `@` and a
    /// number.
    pub labels: HashMap<String, usize>,
}

/// A register and its position in the register file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Up to 64 bits of data. The width is in bits.
    Data {
        /// The number in the register file.
        index: usize,
        /// 8, 16, 32 or 64. A 128-bit register uses two registers, the lower half first.
        width: u32,
    },
    /// A predicate.
    Predicate(usize),
}

/// Memory space of a variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Device memory.
    Global,
    /// Device memory that kernels only read.
    Constant,
    /// Shared memory of a block.
    Shared,
    /// Local memory of a thread.
    Local,
    /// Parameters of a kernel.
    Parameter,
    /// Any of these spaces, depending on the address.
    Generic,
}

/// A declared variable.
#[derive(Clone, Debug)]
pub struct Variable {
    /// The name.
    pub name: String,
    /// The memory space.
    pub space: Space,
    /// The size in bytes, or 0 for an array whose size the launch defines (`.extern .shared`).
    pub size: usize,
    /// The alignment of the address in bytes.
    pub align: usize,
    /// The initial content.
    pub initial: Vec<u8>,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The predicate of the instruction.
    pub guard: Option<Guard>,
    /// The name, such as `ld` in `ld.global.v4.f32`.
    pub name: String,
    /// The modifiers, such as `global`, `v4`, `f32` in `ld.global.v4.f32`.
    pub modifiers: Vec<String>,
    /// The operands, in order.
    pub operands: Vec<Operand>,
    /// The line of the PTX text.
    pub line: usize,
}

/// A guard `@p` or `@!p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The number of the predicate.
    pub predicate: usize,
    /// Whether the predicate must be false.
    pub negated: bool,
}

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register.
    Register(Register),
    /// `!p`
    Not(usize),
    /// `p|q`
    Pair(Box<Operand>, Box<Operand>),
    /// An integer, as the bits of an i64 or a u64.
    Integer(i64),
    /// A number in the form `0f3F800000`.
    F32(f32),
    /// A number in the form `0d3FF0000000000000`, or in decimal.
    F64(f64),
    /// A special register such as `%tid.x`, without the percent sign.
    Special(String),
    /// A variable, a label or a function.
    Symbol(String),
    /// `generic(name)`: the generic address of a variable.
    Generic(String),
    /// `[base+offset]`
    Address {
        /// A register, a symbol, or an integer for an absolute address.
        base: Box<Operand>,
        /// The offset in bytes.
        offset: i64,
    },
    /// `[map, {x, y}]` and `[map, x]`.
    Tensor(Vec<Operand>),
    /// `{a, b}`, and the labels of `brx.idx`.
    Vector(Vec<Operand>),
    /// `_`
    Sink,
}

/// An error in a PTX text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
pub struct Malformed {
    /// The line, counted from 1.
    pub line: usize,
    /// A description of the error.
    pub what: String,
}

impl Instruction {
    /// Returns whether the instruction has a modifier.
    pub fn has(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|other| other == modifier)
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        self.modifiers
            .iter()
            .try_for_each(|modifier| write!(f, ".{modifier}"))
    }
}
