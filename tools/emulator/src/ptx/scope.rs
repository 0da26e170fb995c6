//! Names inside braces: those of an inner pair hide those of an outer one, and end with it.

use std::collections::{HashMap, HashSet};

use super::{Instruction, Kernel, Operand, Register};

/// The open braces of a kernel.
#[derive(Default)]
pub(super) struct Scopes {
    open: Vec<Open>,
    /// The next free numbers, data and predicates.
    next: (usize, usize),
    /// The highest numbers that were ever in use.
    most: (usize, usize),
    closed: usize,
}

#[derive(Default)]
struct Open {
    registers: HashMap<String, Register>,
    /// Each label, and the instruction that it stands before.
    labels: HashMap<String, usize>,
    variables: HashSet<String>,
    /// The state before: instructions, variables, and registers in use.
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

    /// Ends the innermost braces. Its registers are free again: inline assembly declares its own at
    /// each use. Its labels and variables get names that nothing else has.
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

    /// Declares a register of so many bits, or a predicate. False if its braces have one already.
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

    /// Whether the name is new among the labels of its braces; `at` is the instruction behind it.
    pub fn label(&mut self, name: &str, at: usize) -> bool {
        let scope = self.open.last_mut();
        scope.is_some_and(|scope| scope.labels.insert(name.to_owned(), at).is_none())
    }

    /// Whether the name is new among the variables of its braces.
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
