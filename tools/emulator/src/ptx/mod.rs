//! PTX as text, parsed. Only the form of an instruction is known here; [`lower`](crate::lower) gives
//! it a meaning.
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

/// The content of a file.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// `.target`, such as `sm_90a`.
    pub target: String,
    /// Variables outside of kernels: `.global`, `.const` and `.shared`.
    pub variables: Vec<Variable>,
    /// Each `.entry`.
    pub kernels: Vec<Kernel>,
}

/// One `.entry`.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its parameters, in order.
    pub parameters: Vec<Variable>,
    /// Each register's kind and number, by name; those of inner braces are not here.
    pub registers: HashMap<String, Register>,
    /// The numbers of data registers and of predicates.
    pub counts: (usize, usize),
    /// `.local` and `.shared` variables of its body.
    pub variables: Vec<Variable>,
    /// The instructions, in order.
    pub body: Vec<Instruction>,
    /// The instruction that each label stands before; behind the name of one in inner braces
    /// stands `@` and a number.
    pub labels: HashMap<String, usize>,
}

/// A register by its place in the register file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Up to 64 bits of data. The width is in bits.
    Data {
        /// Its number in the file.
        index: usize,
        /// 8, 16, 32 or 64; 128 stands in two registers, the lower half first.
        width: u32,
    },
    /// A predicate.
    Predicate(usize),
}

/// Where a variable lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Memory of the device.
    Global,
    /// Memory of the device that kernels only read.
    Constant,
    /// Memory of a block.
    Shared,
    /// Memory of a thread.
    Local,
    /// Parameters of a kernel.
    Parameter,
    /// Any of these, told apart by the address.
    Generic,
}

/// A declared variable.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub space: Space,
    /// Bytes; 0 for an array whose size the launch gives (`.extern .shared`).
    pub size: usize,
    /// Bytes that its address is a multiple of.
    pub align: usize,
    /// The initial content.
    pub initial: Vec<u8>,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The predicate that it depends on.
    pub guard: Option<Guard>,
    /// `ld` of `ld.global.v4.f32`.
    pub name: String,
    /// `global`, `v4`, `f32` of it.
    pub modifiers: Vec<String>,
    /// The operands, in order.
    pub operands: Vec<Operand>,
    /// The line of the PTX text.
    pub line: usize,
}

/// `@p` or `@!p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The number of the predicate.
    pub predicate: usize,
    /// Whether it must be false.
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
    /// A number, as the bits of an i64 or a u64.
    Integer(i64),
    /// A number of `0f3F800000`.
    F32(f32),
    /// A number of `0d3FF0000000000000`, or in decimal.
    F64(f64),
    /// `%tid.x` and its like, without the percent sign.
    Special(String),
    /// A variable, a label or a function.
    Symbol(String),
    /// `generic(name)`: the generic address of a variable.
    Generic(String),
    /// `[base+offset]`
    Address {
        /// A register or a symbol; an integer for an absolute address.
        base: Box<Operand>,
        /// Bytes.
        offset: i64,
    },
    /// `[map, {x, y}]` and `[map, x]`.
    Tensor(Vec<Operand>),
    /// `{a, b}`; also the labels of `brx.idx`.
    Vector(Vec<Operand>),
    /// `_`
    Sink,
}

/// The fault of a text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {what}")]
pub struct Malformed {
    /// The line, from 1.
    pub line: usize,
    /// A description of the fault.
    pub what: String,
}

impl Instruction {
    /// Whether a modifier stands there.
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
