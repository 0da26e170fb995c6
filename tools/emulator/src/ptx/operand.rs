//! Parses the operands of instructions.

use super::cursor::Parser;
use super::lex::Word;
use super::{Malformed, Operand, Register};

impl Parser<'_> {
    pub fn operand(&mut self) -> Result<Operand, Malformed> {
        let first = self.simple()?;
        if self.is('|') {
            let second = self.simple()?;
            return Ok(Operand::Pair(first.into(), second.into()));
        }
        // `name+8` outside of brackets.
        if matches!(first, Operand::Symbol(_))
            && let Some(offset) = self.offset()?
        {
            let base = Box::new(first);
            return Ok(Operand::Address { base, offset });
        }
        Ok(first)
    }

    pub fn integer(&mut self) -> Result<i64, Malformed> {
        match self.simple()? {
            Operand::Integer(number) => Ok(number),
            other => Err(self.wrong_here(format!("expected an integer, found {other:?}"))),
        }
    }

    /// Parses `+8`, `-8` and `+-8`.
    fn offset(&mut self) -> Result<Option<i64>, Malformed> {
        if self.is('+') || self.peek() == Some(Word::Mark('-')) {
            self.integer().map(Some)
        } else {
            Ok(None)
        }
    }

    fn simple(&mut self) -> Result<Operand, Malformed> {
        self.nested(Self::by_word)
    }

    fn by_word(&mut self) -> Result<Operand, Malformed> {
        match self.next()? {
            Word::Mark('-') => match self.simple()? {
                Operand::Integer(number) => Ok(Operand::Integer(number.wrapping_neg())),
                Operand::F32(number) => Ok(Operand::F32(-number)),
                Operand::F64(number) => Ok(Operand::F64(-number)),
                other => Err(self.wrong_here(format!("-{other:?}"))),
            },
            Word::Mark('!') => match self.simple()? {
                Operand::Register(Register::Predicate(predicate)) => Ok(Operand::Not(predicate)),
                other => Err(self.wrong_here(format!("!{other:?}"))),
            },
            Word::Mark('{') => Ok(Operand::Vector(self.list('}')?)),
            Word::Mark('(') => Ok(Operand::Vector(self.list(')')?)),
            Word::Mark('[') => self.address(),
            Word::Number(digits) => {
                number(digits).ok_or_else(|| self.wrong_here(format!("invalid number {digits}")))
            }
            Word::Name("_") => Ok(Operand::Sink),
            Word::Name("WARP_SZ") => Ok(Operand::Integer(32)),
            Word::Name("generic") if self.is('(') => {
                let name = self.name()?.to_owned();
                self.expect(')')?;
                Ok(Operand::Generic(name))
            }
            Word::Name(name) => Ok(match self.scopes.register(name) {
                Some(register) => Operand::Register(register),
                None => match name.strip_prefix('%') {
                    Some(special) => Operand::Special(special.to_owned()),
                    None => Operand::Symbol(name.to_owned()),
                },
            }),
            other => Err(self.wrong_here(format!("expected an operand, found {other:?}"))),
        }
    }

    fn list(&mut self, end: char) -> Result<Vec<Operand>, Malformed> {
        let mut parts = Vec::new();
        if self.is(end) {
            return Ok(parts);
        }
        loop {
            parts.push(self.operand()?);
            if !self.is(',') {
                self.expect(end)?;
                return Ok(parts);
            }
        }
    }

    fn address(&mut self) -> Result<Operand, Malformed> {
        let base = self.simple()?;
        if self.is(',') {
            let mut parts = vec![base];
            parts.extend(self.list(']')?);
            return Ok(Operand::Tensor(parts));
        }
        let offset = self.offset()?.unwrap_or(0);
        self.expect(']')?;
        let base = Box::new(base);
        Ok(Operand::Address { base, offset })
    }
}

fn number(digits: &str) -> Option<Operand> {
    let exact = |short: &str, long: &str, length: usize| {
        let rest = digits.strip_prefix(short).or(digits.strip_prefix(long))?;
        (rest.len() == length).then_some(rest)
    };
    if let Some(single) = exact("0f", "0F", 8) {
        let bits = u32::from_str_radix(single, 16).ok()?;
        return Some(Operand::F32(f32::from_bits(bits)));
    }
    if let Some(double) = exact("0d", "0D", 16) {
        let bits = u64::from_str_radix(double, 16).ok()?;
        return Some(Operand::F64(f64::from_bits(bits)));
    }
    let plain = digits.strip_suffix('U').unwrap_or(digits);
    let of_radix = |rest, radix| u64::from_str_radix(rest, radix).ok();
    let number = match plain.get(..2) {
        Some("0x" | "0X") => of_radix(&plain[2..], 16)?,
        Some("0b" | "0B") => of_radix(&plain[2..], 2)?,
        _ if plain.contains('.') => return plain.parse().ok().map(Operand::F64),
        Some(two) if two.starts_with('0') => of_radix(plain, 8)?,
        _ => of_radix(plain, 10)?,
    };
    Some(Operand::Integer(number as i64))
}
