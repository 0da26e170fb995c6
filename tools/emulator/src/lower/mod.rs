//! Translates instructions of [`ptx`](crate::ptx) to executable steps.
//!
//! Each family of instructions has a module. The families are tried in turn. An instruction that no family supports
//! is refused when the module is loaded. The error names the instruction.

mod apply;
mod atomic;
mod control;
mod convert;
mod copies;
mod exchange;
mod float;
mod integer;
mod matrix;
mod memory;
mod moves;
mod number;
mod special;

use std::collections::HashMap;

use crate::machine::{Action, Kind, Op, Parameter, Program, Source, Special, reconvergence};
use crate::memory::{LOCAL, PARAMETERS, SHARED};
use crate::ptx::{Instruction, Kernel, Module, Operand, Register, Space, Variable};

/// The reason why a kernel cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kernel}, line {line}: {instruction}: {what}")]
pub struct Unsupported {
    /// The name of the kernel.
    pub kernel: String,
    /// The line of the PTX text.
    pub line: usize,
    /// The text of the instruction.
    pub instruction: String,
    /// A description of the fault.
    pub what: String,
}

/// The result of a family for an instruction, or `None` if the instruction belongs to another family.
pub(crate) type Lowered = Result<Option<(Kind, Action)>, String>;

/// The families, in the order in which they are tried.
const FAMILIES: &[fn(&Instruction, &Scope<'_>) -> Lowered] = &[
    integer::lower,
    float::lower,
    memory::lower,
    moves::lower,
    control::lower,
    convert::lower,
    special::lower,
    exchange::lower,
    matrix::lower,
    atomic::lower,
    copies::lower,
];

/// The names that an instruction can use.
pub(crate) struct Scope<'a> {
    /// The kernel of the instruction.
    pub kernel: &'a Kernel,
    /// The space and the address of each variable.
    symbols: HashMap<&'a str, (Space, u64)>,
}

/// The address of a load or a store: a register or a constant address, plus an offset.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Address {
    pub base: Source,
    pub offset: i64,
}

/// Destination of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A data register and its width in bits. The bits above the width are zero.
    Data(usize, u32),
    /// A predicate.
    Predicate(usize),
    /// The result is discarded.
    Sink,
}

/// Lowers a kernel. `globals` contains the addresses of the module's variables in global memory.
///
/// # Errors
///
/// Returns the first instruction that is not supported.
pub fn lower(
    module: &Module,
    kernel: &Kernel,
    globals: &HashMap<String, u64>,
) -> Result<Program, Box<Unsupported>> {
    let mut symbols = HashMap::new();
    for variable in &module.variables {
        if let Some(address) = globals.get(&variable.name) {
            symbols.insert(variable.name.as_str(), (variable.space, *address));
        }
    }
    let of = |space| move |variable: &&Variable| variable.space == space;
    let everywhere = || module.variables.iter().chain(&kernel.variables);
    // Dynamic shared memory lies behind all variables of fixed size.
    let shared = || everywhere().filter(of(Space::Shared));
    let (fixed, open): (Vec<_>, Vec<_>) = shared().partition(|variable| variable.size > 0);
    let mut size = place(&fixed, Space::Shared, &mut symbols);
    size = size.next_multiple_of(
        open.iter()
            .map(|variable| variable.align)
            .max()
            .unwrap_or(1),
    );
    for variable in open {
        symbols.insert(&variable.name, (Space::Shared, size as u64));
    }
    let local: Vec<_> = everywhere().filter(of(Space::Local)).collect();
    let local = place(&local, Space::Local, &mut symbols);
    let parameters: Vec<_> = kernel.parameters.iter().collect();
    place(&parameters, Space::Parameter, &mut symbols);
    let parameter = |variable: &Variable| Parameter {
        offset: symbols[variable.name.as_str()].1 as usize,
        size: variable.size,
    };
    let parameters = kernel.parameters.iter().map(parameter).collect();
    let scope = Scope { kernel, symbols };
    let ops: Result<_, _> = kernel
        .body
        .iter()
        .map(|instruction| op(instruction, &scope))
        .collect();
    let mut ops: Vec<_> = ops?;
    // A kernel ends at the end of its text.
    let end = Instruction {
        guard: None,
        name: "ret".into(),
        modifiers: Vec::new(),
        operands: Vec::new(),
        line: kernel.body.last().map_or(1, |last| last.line),
    };
    ops.push(op(&end, &scope)?);
    Ok(Program {
        name: kernel.name.clone(),
        reconvergences: reconvergence(&ops),
        ops,
        registers: kernel.counts,
        shared: size,
        local: local.next_multiple_of(16),
        parameters,
        asynchronous: kernel
            .body
            .iter()
            .any(|instruction| instruction.name == "mbarrier"),
    })
}

/// Places variables one after the other, and returns their total size in bytes.
fn place<'a>(
    variables: &[&'a Variable],
    space: Space,
    symbols: &mut HashMap<&'a str, (Space, u64)>,
) -> usize {
    let mut end = 0usize;
    for variable in variables {
        end = end.next_multiple_of(variable.align.max(1));
        symbols.insert(&variable.name, (space, end as u64));
        end += variable.size;
    }
    end
}

fn op(instruction: &Instruction, scope: &Scope<'_>) -> Result<Op, Box<Unsupported>> {
    let refused = |what| {
        Box::new(Unsupported {
            kernel: scope.kernel.name.clone(),
            line: instruction.line,
            instruction: instruction.to_string(),
            what,
        })
    };
    for family in FAMILIES {
        if let Some((kind, action)) = family(instruction, scope).map_err(refused)? {
            return Ok(Op {
                guard: instruction.guard,
                action,
                kind,
                line: instruction.line,
                text: instruction.to_string(),
            });
        }
    }
    Err(refused("is not known here".into()))
}

impl Scope<'_> {
    /// Returns the source of an operand. Constants are converted to the type of a modifier such as `f32`.
    pub fn source(&self, operand: &Operand, of_type: &str) -> Result<Source, String> {
        match operand {
            Operand::Register(Register::Data { index, .. }) => Ok(Source::Register(*index)),
            Operand::Register(Register::Predicate(index)) => Ok(Source::Predicate(*index)),
            Operand::Integer(number) => Ok(Source::Value(narrow(*number as u64, of_type))),
            Operand::F32(number) => Ok(Source::Value(match of_type {
                "f64" => f64::from(*number).to_bits(),
                _ => number.to_bits().into(),
            })),
            Operand::F64(number) => Ok(Source::Value(match of_type {
                "f32" => (*number as f32).to_bits().into(),
                _ => number.to_bits(),
            })),
            Operand::Special(name) => match copies::cluster(name) {
                Some(source) => Ok(source),
                None => special(name).map(Source::Special),
            },
            // As for `mov`: the address in the variable's space.
            Operand::Symbol(name) => self.symbol(name).map(|(_, address)| Source::Value(address)),
            Operand::Address { base, offset } if matches!(**base, Operand::Symbol(_)) => match self
                .source(base, of_type)?
            {
                Source::Value(address) => Ok(Source::Value(address.wrapping_add_signed(*offset))),
                other => Ok(other),
            },
            other => Err(format!("expected a value, found {other:?}")),
        }
    }

    /// Returns the operand at a position.
    pub fn at(
        &self,
        instruction: &Instruction,
        place: usize,
        of_type: &str,
    ) -> Result<Source, String> {
        let operand = instruction.operands.get(place);
        self.source(
            operand.ok_or(format!("operand {place} is missing"))?,
            of_type,
        )
    }

    /// Returns the destination of a result.
    pub fn target(&self, operand: &Operand) -> Result<Target, String> {
        match operand {
            Operand::Register(Register::Data { index, width }) => Ok(Target::Data(*index, *width)),
            Operand::Register(Register::Predicate(index)) => Ok(Target::Predicate(*index)),
            Operand::Sink => Ok(Target::Sink),
            other => Err(format!("{other:?} cannot be written")),
        }
    }

    /// Returns the number and the width of the data register of the first operand.
    pub fn result(&self, instruction: &Instruction) -> Result<(usize, u32), String> {
        match instruction
            .operands
            .first()
            .map(|operand| self.target(operand))
        {
            Some(Ok(Target::Data(index, width))) => Ok((index, width)),
            _ => Err("the destination is not a data register".into()),
        }
    }

    /// Returns the operand in brackets at a position.
    pub fn address(&self, instruction: &Instruction, place: usize) -> Result<Address, String> {
        match instruction.operands.get(place) {
            Some(Operand::Address { base, offset }) => Ok(Address {
                base: self.source(base, "u64")?,
                offset: *offset,
            }),
            other => Err(format!("expected an address, found {other:?}")),
        }
    }

    /// Returns the space and the address of a variable.
    pub fn symbol(&self, name: &str) -> Result<(Space, u64), String> {
        let found = self.symbols.get(name).copied();
        found.ok_or_else(|| format!("{name} is not declared"))
    }

    /// Returns the index of the instruction at a label.
    pub fn label(&self, operand: &Operand) -> Result<usize, String> {
        match operand {
            Operand::Symbol(name) => {
                let target = self.kernel.labels.get(name).copied();
                target.ok_or_else(|| format!("undefined label {name}"))
            }
            other => Err(format!("expected a label, found {other:?}")),
        }
    }
}

/// Returns the generic address of an address in a space.
pub(crate) fn generic(space: Space, address: u64) -> u64 {
    match space {
        Space::Shared => SHARED + address,
        Space::Local => LOCAL + address,
        Space::Parameter => PARAMETERS + address,
        _ => address,
    }
}

/// Returns the number of bits of a type such as `u16`. Predicates and unknown types have 64.
pub(crate) fn bits(of_type: &str) -> u32 {
    match of_type {
        "f16x2" | "bf16x2" => 32,
        "e4m3x2" | "e5m2x2" => 16,
        "bf16" => 16,
        "tf32" => 32,
        _ => of_type
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .parse()
            .unwrap_or(64),
    }
}

/// Returns the lower bits of a value that a type has.
pub(crate) fn narrow(value: u64, of_type: &str) -> u64 {
    value & (u64::MAX >> (64 - bits(of_type).clamp(1, 64)))
}

fn special(name: &str) -> Result<Special, String> {
    let axis = |suffix: &str| "xyz".find(suffix).ok_or(format!("%{name} is not known"));
    let masks = ["eq", "le", "lt", "ge", "gt"];
    let mask = |which: &str| masks.iter().position(|mask| *mask == which);
    Ok(match name.split_once('.') {
        Some(("tid", suffix)) => Special::Thread(axis(suffix)?),
        Some(("ntid", suffix)) => Special::Threads(axis(suffix)?),
        Some(("ctaid", suffix)) => Special::Block(axis(suffix)?),
        Some(("nctaid", suffix)) => Special::Blocks(axis(suffix)?),
        _ => match (name, name.strip_prefix("lanemask_").and_then(mask)) {
            (_, Some(which)) => Special::Lanes(which),
            ("laneid", _) => Special::Lane,
            ("warpid", _) => Special::Warp,
            ("dynamic_smem_size", _) => Special::DynamicShared,
            ("clock" | "clock64" | "globaltimer", _) => Special::Clock,
            _ => return Err(format!("%{name} is not known")),
        },
    })
}
