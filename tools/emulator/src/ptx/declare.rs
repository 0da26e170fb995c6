//! Declarations of registers and variables.

use super::cursor::Parser;
use super::{Malformed, Operand, Space, Variable};

/// A limit above the number of registers of any kernel, so that a text cannot exhaust the memory.
const REGISTERS: i64 = 1 << 20;
/// A limit above the size of any module variable in bytes.
const BYTES: usize = 1 << 32;

impl Parser<'_> {
    /// Parses `.reg .b32 %r<12>;` and `.reg .b32 a, b;`.
    pub fn registers(&mut self) -> Result<(), Malformed> {
        self.at += 1;
        let kind = self.name()?;
        let width = width(kind);
        if width.is_none() && kind != ".pred" {
            return Err(self.wrong_here(format!("invalid register type {kind}")));
        }
        loop {
            let name = self.name()?;
            if self.is('<') {
                let count = self.integer()?;
                if !(0..=REGISTERS).contains(&count) {
                    return Err(self.wrong(format!("{count} registers")));
                }
                self.expect('>')?;
                for number in 0..count {
                    self.register(format!("{name}{number}"), width)?;
                }
            } else {
                self.register(name.to_owned(), width)?;
            }
            if !self.is(',') {
                return self.expect(';');
            }
        }
    }

    fn register(&mut self, name: String, width: Option<u32>) -> Result<(), Malformed> {
        if self.scopes.declare(name.clone(), width) {
            Ok(())
        } else {
            Err(self.wrong(format!("a second register {name}")))
        }
    }

    /// Parses a variable such as `.shared .align 16 .b8 name[64]`, without the character after it.
    pub fn variable(&mut self) -> Result<Variable, Malformed> {
        let (mut space, mut align, mut element, mut vector) = (None, None, None, 1);
        // The attributes after `.ptr` describe the address, not the variable.
        let mut pointer = false;
        let name = loop {
            match self.name()? {
                ".align" if pointer => {
                    self.integer()?;
                }
                ".global" | ".const" | ".shared" | ".local" | ".param" if pointer => {}
                ".global" => space = Some(Space::Global),
                ".const" => space = Some(Space::Constant),
                ".shared" => space = Some(Space::Shared),
                ".local" => space = Some(Space::Local),
                ".param" => space = Some(Space::Parameter),
                ".align" => align = Some(self.alignment()?),
                ".ptr" => pointer = true,
                ".v2" => vector = 2,
                ".v4" => vector = 4,
                ".extern" | ".visible" | ".weak" | ".common" => {}
                // `.attribute(.managed)`
                ".attribute" => self.skip_past(')')?,
                kind if kind.starts_with('.') => match width(kind) {
                    Some(width) => element = Some(width as usize / 8),
                    None => return Err(self.wrong_here(format!("{kind} is not known here"))),
                },
                name => break name.to_owned(),
            }
        };
        let single = element.ok_or_else(|| self.wrong_here(format!("{name} has no type")))?;
        let element = single * vector;
        let count = self.lengths()?;
        let bytes = count.and_then(|count| element.checked_mul(count));
        let size = bytes.filter(|size| *size <= BYTES);
        let size = size.ok_or_else(|| self.wrong(format!("{name} is too large")))?;
        let initial = if self.is('=') {
            self.initial(single)?
        } else {
            Vec::new()
        };
        if initial.len() > size && size > 0 {
            return Err(self.wrong(format!("{name} has {size} bytes, not {}", initial.len())));
        }
        Ok(Variable {
            space: space.ok_or_else(|| self.wrong(format!("{name} has no state space")))?,
            size,
            align: align.unwrap_or(element),
            name,
            initial,
        })
    }

    fn alignment(&mut self) -> Result<usize, Malformed> {
        let align = self.integer()?;
        match usize::try_from(align) {
            Ok(align) if align.is_power_of_two() && align <= 1 << 16 => Ok(align),
            _ => Err(self.wrong_here(format!("an alignment of {align}"))),
        }
    }

    /// Returns the product of lengths such as `[4][8]`, or 0 for `[]`. Returns `None` on overflow.
    fn lengths(&mut self) -> Result<Option<usize>, Malformed> {
        let mut count = Some(1usize);
        while self.is('[') {
            let mut length = 0;
            if !self.is(']') {
                length = self.integer()?;
                self.expect(']')?;
            }
            let length = usize::try_from(length).ok();
            count = count.and_then(|count| count.checked_mul(length?));
        }
        Ok(count)
    }

    /// Parses an initializer such as `{1, 2, 0f3F800000}`, which may be nested, or a single number. Returns its
    /// bytes.
    fn initial(&mut self, element: usize) -> Result<Vec<u8>, Malformed> {
        if self.is('{') {
            return self.nested(|parser| {
                let mut bytes = Vec::new();
                loop {
                    bytes.extend(parser.initial(element)?);
                    if !parser.is(',') {
                        parser.expect('}')?;
                        return Ok(bytes);
                    }
                }
            });
        }
        let bits = match self.operand()? {
            Operand::Integer(number) => number as u64,
            Operand::F32(number) => number.to_bits().into(),
            Operand::F64(number) => number.to_bits(),
            // An address is known only after the module is loaded.
            other => return Err(self.wrong_here(format!("expected a number, found {other:?}"))),
        };
        let mut bytes = bits.to_le_bytes().to_vec();
        bytes.resize(element, 0);
        Ok(bytes)
    }
}

/// Returns the number of bits of a type such as `.f32`.
fn width(kind: &str) -> Option<u32> {
    match kind {
        ".b8" | ".u8" | ".s8" => Some(8),
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => Some(16),
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => Some(32),
        ".b64" | ".u64" | ".s64" | ".f64" => Some(64),
        ".b128" => Some(128),
        _ => None,
    }
}
