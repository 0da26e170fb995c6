//! Parses the instructions of a listing, with their registers, memory accesses and jump targets.

use std::collections::HashMap;
use std::fmt;

use crate::sass::{self, Access, Direction};

/// A register of a unit (`R`) or of a plane (`UR`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Register {
    /// A register of each unit.
    Unit(u32),
    /// A register shared by all units of a plane.
    Uniform(u32),
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The name with all modifiers.
    pub name: String,
    /// Whether the instruction is predicated.
    pub conditional: bool,
    /// The index of the instruction at the jump target.
    pub target: Option<usize>,
    /// The access to global memory.
    pub access: Option<Access>,
    /// The text after the name.
    operands: String,
}

/// The memory traffic of an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryTraffic {
    /// The number of bytes, or 0 for cached data.
    pub bytes: u64,
    /// Whether the instruction loads these bytes.
    pub loads: bool,
}

/// The instructions of a kernel, in the order of the listing.
#[derive(Clone, Debug, Default)]
pub struct MachineCode {
    /// The instructions.
    pub instructions: Vec<Instruction>,
}

impl MachineCode {
    /// Reads a listing of `nvdisasm -c`.
    pub fn parse(listing: &str) -> Self {
        let mut labels = HashMap::new();
        let mut instructions = Vec::new();
        let mut jumps = Vec::new();
        for line in listing.lines() {
            if let Some(label) = line.trim().strip_suffix(':') {
                labels.insert(label, instructions.len());
            } else if let Some(instruction) = Instruction::parse(line) {
                jumps.push(sass::branch(line));
                instructions.push(instruction);
            }
        }
        for (instruction, label) in instructions.iter_mut().zip(jumps) {
            instruction.target = label.and_then(|label| labels.get(label).copied());
        }
        Self { instructions }
    }

    /// Returns the memory traffic of each instruction. `cached` contains indices of pointers among the parameters of
    /// the kernel. The parameters begin at `first` in the constant bank.
    ///
    /// The pointer of an access is found by following registers in the order of the listing. A value that was loaded
    /// from memory is not treated as a pointer.
    pub fn traffic(&self, cached: &[u32], first: u32) -> Vec<MemoryTraffic> {
        let constants: Vec<_> = cached.iter().map(|place| first + 8 * place).collect();
        let mut shared: HashMap<Register, bool> = HashMap::new();
        let mut traffic = Vec::new();
        for instruction in &self.instructions {
            let from = |register: &Register| shared.get(register).copied().unwrap_or(false);
            traffic.push(match &instruction.access {
                Some(access) if !registers(&access.base).any(|base| from(&base)) => MemoryTraffic {
                    bytes: u64::from(access.bits / 8),
                    loads: access.direction == Direction::Load,
                },
                _ => MemoryTraffic::default(),
            });
            let Some(target) = instruction.target_register() else {
                continue;
            };
            let mut is_shared = instruction.sources().any(|source| from(&source));
            is_shared |= constant(&instruction.operands).is_some_and(|at| constants.contains(&at));
            is_shared &= !instruction.is_memory();
            is_shared |= instruction.conditional && from(&target);
            shared.insert(target, is_shared);
        }
        traffic
    }
}

impl Instruction {
    /// Reads a line such as `/*0070*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10] ;`.
    fn parse(line: &str) -> Option<Self> {
        let name = sass::opcode(line)?.trim_end_matches(';');
        let (before, after) = line.split_once(name)?;
        let operands = after.split(';').next()?.trim();
        // A branch may also have its predicate or its divergence behind the name.
        let jump = name.split('.').next() == Some("BRA");
        let plain = name == "BRA" && operands.starts_with('`');
        Some(Self {
            name: name.into(),
            conditional: before.contains('@') || (jump && !plain),
            target: None,
            access: sass::access(line),
            operands: operands.into(),
        })
    }

    /// Returns the name without modifiers.
    pub fn kind(&self) -> &str {
        self.name.split('.').next().unwrap_or_default()
    }

    /// Returns whether the result of the instruction comes from memory.
    fn is_memory(&self) -> bool {
        matches!(
            self.kind(),
            "LDG" | "LD" | "LDS" | "LDL" | "LDSM" | "LDGSTS" | "ATOM" | "ATOMG" | "ATOMS"
        )
    }

    /// Returns every register of the operands. For a wide store, the result includes all registers that are stored.
    pub fn registers(&self) -> impl Iterator<Item = Register> + '_ {
        let stored = match (&self.access, self.operands.rsplit(' ').next()) {
            (Some(access), Some(last)) if access.direction == Direction::Store => {
                let width = access.bits.div_ceil(32);
                registers(last)
                    .flat_map(move |r| r.wide(width))
                    .collect::<Vec<_>>()
            }
            _ => vec![],
        };
        registers(&self.operands).chain(stored)
    }

    /// Returns the registers that a load fills.
    pub fn loaded(&self) -> impl Iterator<Item = Register> + '_ {
        let loads = self.access.iter();
        let loads = loads.filter(|access| access.direction == Direction::Load);
        loads.flat_map(|access| {
            let target = self.target_register().into_iter();
            target.flat_map(|register| register.wide(access.bits.div_ceil(32)))
        })
    }

    /// Returns the first register that the instruction writes.
    fn target_register(&self) -> Option<Register> {
        let kind = self.kind();
        let writes_none = kind.ends_with("SETP") || kind.starts_with("ST") || kind == "LDGSTS";
        let mut operands = self.operands.split(',').map(str::trim);
        let first = operands.find(|operand| !is_predicate(operand))?;
        let is_register = first.starts_with('R') || first.starts_with("UR");
        if writes_none || !is_register {
            None
        } else {
            registers(first).next()
        }
    }

    /// Returns the registers that the instruction reads. Registers that it writes are included if they appear again
    /// among the operands.
    fn sources(&self) -> impl Iterator<Item = Register> + '_ {
        let mut all = registers(&self.operands);
        if self.target_register().is_some() {
            all.next();
        }
        all
    }
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.operands)
    }
}

impl Register {
    fn wide(self, width: u32) -> impl Iterator<Item = Register> {
        (0..width).map(move |more| match self {
            Register::Unit(first) => Register::Unit(first + more),
            Register::Uniform(first) => Register::Uniform(first + more),
        })
    }
}

fn is_predicate(operand: &str) -> bool {
    let name = operand.trim_start_matches(['!', 'U']);
    name == "PT" || (name.starts_with('P') && name[1..].parse::<u32>().is_ok())
}

/// Returns the registers in a text. `RZ` is not included.
fn registers(text: &str) -> impl Iterator<Item = Register> + '_ {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric());
    words.filter_map(|word| match word.strip_prefix("UR") {
        Some(number) => number.parse().ok().map(Register::Uniform),
        None => {
            let number = word.strip_prefix('R')?;
            number.parse().ok().map(Register::Unit)
        }
    })
}

/// Returns the offset in the constant bank: 0x210 for `R2, c[0x0][0x210]`.
fn constant(operands: &str) -> Option<u32> {
    let (_, after) = operands.split_once("c[0x0][0x")?;
    let digits = after.split(']').next()?;
    u32::from_str_radix(digits, 16).ok()
}
