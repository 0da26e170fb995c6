//! Names inside braces. Names of inner braces hide names of outer braces, and end with the inner braces.

use std::collections::{HashMap, HashSet};

use super::{Instruction, Kernel, Operand, Register};

/// The open braces of a kernel.
#[derive(Default)]
pub(super) struct Scopes {
    open: Vec<Open>,
    /// The next free numbers of data registers and predicates.
    next: (usize, usize),
    /// The highest numbers that were in use at the same time.
    most: (usize, usize),
    closed: usize,
}

#[derive(Default)]
struct Open {
    registers: HashMap<String, Register>,
    /// Each label and the index of its instruction.
    labels: HashMap<String, usize>,
    variables: HashSet<String>,
    /// The earlier state: the numbers of instructions, variables, and registers in use.
    body: usize,
    outer_variables: usize,
    next: (usize, usize),
}

impl Scopes {
    pub fn open(&mut self, kernel: &Kernel) {
        self.open.push(Open {
            body: kernel.body.len(),
            outer_variables: kernel.variables.len(),
            next: self.next,
            ..Open::default()
        });
    }

    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// Ends the innermost braces. Their registers become free again, since inline assembly declares its registers at
    /// each use. Their labels and variables get unique names.
    pub fn close(&mut self, kernel: &mut Kernel) {
        let Some(scope) = self.open.pop() else {
            return;
        };
        if self.open.is_empty() {
            kernel.registers = scope.registers;
            kernel.labels.extend(scope.labels);
            kernel.counts = self.most;
            *self = Self::default();
            return;
        }
        self.next = scope.next;
        self.closed += 1;
        let inner = |name: &str| format!("{name}@{}", self.closed);
        let labels = scope.labels.iter();
        kernel
            .labels
            .extend(labels.map(|(label, at)| (inner(label), *at)));
        for variable in &mut kernel.variables[scope.outer_variables..] {
            if scope.variables.contains(&variable.name) {
                variable.name = inner(&variable.name);
            }
        }
        let renamed: HashMap<_, _> = scope
            .labels
            .keys()
            .chain(&scope.variables)
            .map(|name| (name.as_str(), inner(name)))
            .collect();
        if !renamed.is_empty() {
            kernel.body[scope.body..]
                .iter_mut()
                .for_each(|instruction| rename(instruction, &renamed));
        }
    }

    pub fn register(&self, name: &str) -> Option<Register> {
        let scopes = self.open.iter().rev();
        scopes
            .filter_map(|scope| scope.registers.get(name))
            .next()
            .copied()
    }

    /// Declares a register with `width` bits, or a predicate. Returns `false` if the braces already have this name.
    pub fn declare(&mut self, name: String, width: Option<u32>) -> bool {
        let (data, predicates) = &mut self.next;
        let register = match width {
            None => {
                *predicates += 1;
                Register::Predicate(*predicates - 1)
            }
            Some(width) => {
                let index = *data;
                *data += width.div_ceil(64) as usize;
                Register::Data { index, width }
            }
        };
        self.most.0 = self.most.0.max(self.next.0);
        self.most.1 = self.most.1.max(self.next.1);
        let scope = self.open.last_mut();
        scope.is_some_and(|scope| scope.registers.insert(name, register).is_none())
    }

    /// Adds a label at instruction `at`. Returns whether the name is new among the labels of its braces.
    pub fn label(&mut self, name: &str, at: usize) -> bool {
        let scope = self.open.last_mut();
        scope.is_some_and(|scope| scope.labels.insert(name.to_owned(), at).is_none())
    }

    /// Adds a variable. Returns whether the name is new among the variables of its braces.
    pub fn variable(&mut self, name: &str) -> bool {
        let scope = self.open.last_mut();
        scope.is_some_and(|scope| scope.variables.insert(name.to_owned()))
    }
}

fn rename(instruction: &mut Instruction, names: &HashMap<&str, String>) {
    instruction
        .operands
        .iter_mut()
        .for_each(|operand| rename_operand(operand, names));
}

fn rename_operand(operand: &mut Operand, names: &HashMap<&str, String>) {
    match operand {
        Operand::Symbol(name) | Operand::Generic(name) => {
            if let Some(new) = names.get(name.as_str()) {
                new.clone_into(name);
            }
        }
        Operand::Address { base, .. } => rename_operand(base, names),
        Operand::Pair(first, second) => {
            rename_operand(first, names);
            rename_operand(second, names);
        }
        Operand::Tensor(parts) | Operand::Vector(parts) => parts
            .iter_mut()
            .for_each(|part| rename_operand(part, names)),
        _ => {}
    }
}
