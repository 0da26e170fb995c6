//! Parses words into instructions.

use super::cursor::Parser;
use super::lex::{Word, lex};
use super::{Guard, Instruction, Kernel, Malformed, Module, Operand, Register};

/// Parses a file. Functions (`.func`) are skipped. A call of a function is refused when it is lowered.
///
/// # Errors
///
/// Returns the line of the error and its description.
pub fn parse(text: &str) -> Result<Module, Malformed> {
    let tokens = lex(text)?;
    let mut parser = Parser::new(&tokens);
    let mut module = Module::default();
    while parser.at < tokens.len() {
        parser.directive(&mut module)?;
    }
    Ok(module)
}

impl Parser<'_> {
    fn directive(&mut self, module: &mut Module) -> Result<(), Malformed> {
        match self.peek() {
            Some(Word::Name(".version" | ".address_size" | ".file")) => {
                self.skip_line(self.line());
            }
            Some(Word::Name(".pragma" | ".alias")) => self.skip_past(';')?,
            Some(Word::Name(".target")) => {
                let line = self.line();
                self.at += 1;
                module.target = self.name()?.to_owned();
                self.skip_line(line);
            }
            Some(Word::Name(".section")) => self.skip_past('}')?,
            Some(Word::Name(".func")) => self.function()?,
            Some(Word::Name(".visible" | ".weak" | ".extern" | ".common")) => self.at += 1,
            Some(Word::Name(".entry")) => {
                self.at += 1;
                let kernel = self.kernel()?;
                module.kernels.push(kernel);
            }
            Some(Word::Name(".global" | ".const" | ".shared")) => {
                let variable = self.variable()?;
                self.expect(';')?;
                module.variables.push(variable);
            }
            Some(Word::Mark(';')) => self.at += 1,
            other => return Err(self.wrong(format!("{other:?} is not known here"))),
        }
        Ok(())
    }

    /// Parses a declaration, or a body in braces.
    fn function(&mut self) -> Result<(), Malformed> {
        let mut depth = 0usize;
        loop {
            match self.next()? {
                Word::Mark('{') => depth += 1,
                Word::Mark('}') if depth <= 1 => return Ok(()),
                Word::Mark('}') => depth -= 1,
                Word::Mark(';') if depth == 0 => return Ok(()),
                _ => {}
            }
        }
    }

    fn kernel(&mut self) -> Result<Kernel, Malformed> {
        let mut kernel = Kernel {
            name: self.name()?.to_owned(),
            ..Kernel::default()
        };
        if self.is('(') && !self.is(')') {
            loop {
                let parameter = self.variable()?;
                kernel.parameters.push(parameter);
                if !self.is(',') {
                    self.expect(')')?;
                    break;
                }
            }
        }
        // Skips directives such as `.maxntid 256, 1, 1`.
        while self.peek() != Some(Word::Mark('{')) {
            self.next()?;
        }
        self.at += 1;
        self.scopes.open(&kernel);
        while self.scopes.depth() > 0 {
            if self.is('{') {
                self.scopes.open(&kernel);
            } else if self.is('}') {
                self.scopes.close(&mut kernel);
            } else {
                self.statement(&mut kernel)?;
            }
        }
        self.fill_tables(&mut kernel);
        Ok(kernel)
    }

    /// Replaces the table of `brx.idx %r1, table` by its labels.
    fn fill_tables(&mut self, kernel: &mut Kernel) {
        for instruction in &mut kernel.body {
            let Some(Operand::Symbol(name)) = instruction.operands.get(1) else {
                continue;
            };
            if let (true, Some(labels)) = (instruction.name == "brx", self.tables.get(name)) {
                instruction.operands[1] = Operand::Vector(labels.clone());
            }
        }
        self.tables.clear();
    }

    fn statement(&mut self, kernel: &mut Kernel) -> Result<(), Malformed> {
        match self.peek() {
            Some(Word::Name(".reg")) => self.registers(),
            Some(Word::Name(".local" | ".shared" | ".param")) => {
                let variable = self.variable()?;
                if !self.scopes.variable(&variable.name) {
                    return Err(self.wrong_here(format!("a second variable {}", variable.name)));
                }
                kernel.variables.push(variable);
                self.expect(';')
            }
            Some(Word::Name(".loc" | ".file")) => {
                self.skip_line(self.line());
                Ok(())
            }
            Some(Word::Name(".pragma" | ".callprototype" | ".calltargets")) => self.skip_past(';'),
            Some(Word::Mark(';')) => {
                self.at += 1;
                Ok(())
            }
            Some(Word::Name(label)) if self.follows(Word::Mark(':')) => self.label(label, kernel),
            _ => {
                let instruction = self.instruction()?;
                kernel.body.push(instruction);
                Ok(())
            }
        }
    }

    fn label(&mut self, label: &str, kernel: &Kernel) -> Result<(), Malformed> {
        self.at += 2;
        if self.peek() == Some(Word::Name(".branchtargets")) {
            let list = self.instruction()?;
            self.tables.insert(label.to_owned(), list.operands);
            return Ok(());
        }
        if self.scopes.label(label, kernel.body.len()) {
            Ok(())
        } else {
            Err(self.wrong_here(format!("a second label {label}")))
        }
    }

    fn instruction(&mut self) -> Result<Instruction, Malformed> {
        let line = self.line();
        let guard = if self.is('@') {
            Some(self.guard()?)
        } else {
            None
        };
        let mut parts = self.name()?.split('.').map(str::to_owned);
        let name = parts.next().unwrap_or_default();
        let mut instruction = Instruction {
            guard,
            name,
            modifiers: parts.collect(),
            operands: Vec::new(),
            line,
        };
        if self.is(';') {
            return Ok(instruction);
        }
        loop {
            let operand = self.operand()?;
            instruction.operands.push(operand);
            if self.is(';') {
                return Ok(instruction);
            }
            if !self.is(',') {
                return Err(self.wrong(format!("{:?} in {instruction}", self.peek())));
            }
        }
    }

    fn guard(&mut self) -> Result<Guard, Malformed> {
        let negated = self.is('!');
        match self.operand()? {
            Operand::Register(Register::Predicate(predicate)) => Ok(Guard { predicate, negated }),
            other => Err(self.wrong_here(format!("expected a predicate, found {other:?}"))),
        }
    }
}
