//! Reads accesses to global memory and matrix products from the instructions that `nvdisasm` lists.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// Whether memory is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Memory is read.
    Load,
    /// Memory is written.
    Store,
}

/// An instruction that reads or writes global memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The direction of the access.
    pub direction: Direction,
    /// The number of bits that one unit moves.
    pub bits: u32,
    /// Registers of the address.
    pub base: String,
    /// Bytes that the instruction adds to the address.
    pub offset: i64,
}

/// Writes an access as in `loaded 32 at a time ([R4.64+16])`.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = match self.direction {
            Direction::Load => "loaded",
            Direction::Store => "stored",
        };
        let Self {
            bits, base, offset, ..
        } = self;
        write!(f, "{done} {bits} at a time ([{base}+{offset}])")
    }
}

/// The accesses to global memory of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// All accesses in the order of the listing. Atomic operations are not included.
    pub all: Vec<Access>,
    /// For each loop without an inner loop: the range of its accesses in `all`.
    pub loops: Vec<Range<usize>>,
}

/// Reads a listing of `nvdisasm -c`.
pub fn parse(listing: &str) -> Accesses {
    let mut all = Vec::new();
    let mut labels = HashMap::new();
    let mut loops: HashMap<usize, (usize, Range<usize>)> = HashMap::new();
    for (number, line) in listing.lines().enumerate() {
        if let Some(label) = line.trim().strip_suffix(':') {
            labels.insert(label, (number, all.len()));
        } else if let Some(access) = access(line) {
            all.push(access);
        } else if let Some((start, first)) = branch(line).and_then(|label| labels.get(label)) {
            // Only labels further up have been read, so this jump ends a loop.
            loops.insert(*start, (number, *first..all.len()));
        }
    }
    Accesses {
        all,
        loops: innermost(loops),
    }
}

/// Returns the number of tensor core instructions in a listing of `nvdisasm -c`.
pub fn products(listing: &str) -> usize {
    let multiplies = |line: &&str| {
        let name = opcode(line).and_then(|opcode| opcode.split('.').next());
        matches!(
            name,
            Some("HMMA" | "IMMA" | "DMMA" | "HGMMA" | "QGMMA" | "UTCHMMA")
        )
    };
    listing.lines().filter(multiplies).count()
}

/// Returns the name of the instruction in a line with its modifiers, without the predicate before it.
pub(crate) fn opcode(line: &str) -> Option<&str> {
    let mut words = line.split("*/").nth(1)?.split_whitespace();
    let first = words.next()?;
    if first.starts_with('@') {
        words.next()
    } else {
        Some(first)
    }
}

/// Returns the accesses of the innermost loops. Each loop is given by its first line, its last line and its accesses.
fn innermost(loops: HashMap<usize, (usize, Range<usize>)>) -> Vec<Range<usize>> {
    let holds_none = |start: usize, end: usize| {
        let inside = |(other, (last, _)): (&usize, &(usize, _))| *other > start && *last <= end;
        !loops.iter().any(inside)
    };
    let mut kept: Vec<_> = loops
        .iter()
        .filter(|(start, (end, _))| holds_none(**start, *end))
        .map(|(_, (_, accesses))| accesses.clone())
        .collect();
    kept.sort_by_key(|accesses| (accesses.start, accesses.end));
    kept
}

/// Returns the label that a line such as ``@P0 BRA `(.L_x_1) ;`` jumps to.
pub(crate) fn branch(line: &str) -> Option<&str> {
    let (before, after) = line.split_once("`(")?;
    let (label, _) = after.split_once(')')?;
    before.contains(" BRA").then_some(label)
}

/// Reads a line such as `/*0070*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64+0x10] ;`.
pub(crate) fn access(line: &str) -> Option<Access> {
    let mut modifiers = opcode(line)?.split('.');
    let direction = match modifiers.next()? {
        // `LD` and `ST` use an address space that the assembler could not determine. `LDGSTS` copies to shared
        // memory.
        "LDG" | "LD" | "LDGSTS" => Direction::Load,
        "STG" | "ST" => Direction::Store,
        _ => return None,
    };
    let bits = modifiers.filter_map(bits).next_back().unwrap_or(32);
    let (base, offset) = address(line.split("*/").nth(1)?)?;
    Some(Access {
        direction,
        bits,
        base,
        offset,
    })
}

fn bits(modifier: &str) -> Option<u32> {
    match modifier {
        "U8" | "S8" => Some(8),
        "U16" | "S16" => Some(16),
        "64" => Some(64),
        "128" => Some(128),
        "256" => Some(256),
        _ => None,
    }
}

/// Returns the base and the offset of the last `[..]` of an instruction, which is the global address.
fn address(code: &str) -> Option<(String, i64)> {
    let (_, inside) = code.rsplit_once('[')?;
    let (inside, _) = inside.split_once(']')?;
    match inside.rsplit_once('+') {
        Some((base, last)) => match immediate(last) {
            Some(offset) => Some((base.into(), offset)),
            None => Some((inside.into(), 0)),
        },
        None => Some((inside.into(), 0)),
    }
}

/// Reads `0x10` and `-0x10`.
fn immediate(text: &str) -> Option<i64> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text),
    };
    let digits = digits.strip_prefix("0x")?;
    i64::from_str_radix(digits, 16)
        .ok()
        .map(|value| sign * value)
}

#[cfg(test)]
mod tests {
    use super::Direction::{Load, Store};
    use super::*;

    fn found(listing: &str) -> Vec<(Direction, u32, String, i64)> {
        let all = parse(listing).all.into_iter();
        all.map(|a| (a.direction, a.bits, a.base, a.offset))
            .collect()
    }

    #[test]
    fn both_ways_of_writing_an_address_are_read() {
        let sm_80 = "\
        /*0070*/                   ULDC.64 UR4, c[0x0][0x118] ;
        /*00a0*/                   LDG.E.128.CONSTANT R4, [R4.64] ;
        /*00c0*/              @!P0 LDG.E.CONSTANT R2, [R8.64+-0x8] ;
        /*0220*/                   STL [R1], R3                    (*\"SpillRefill\"*);
        /*02a0*/                   STG.E.64 [R2.64+UR4+0x10], R4 ;";
        let expected = [
            (Load, 128, "R4.64".into(), 0),
            (Load, 32, "R8.64".into(), -8),
            (Store, 64, "R2.64+UR4".into(), 16),
        ];
        assert_eq!(found(sm_80), expected);
        let sm_100 = "\
        /*0090*/                   LDCU.64 UR4, c[0x0][0x358] ;
        /*00d0*/                   LDG.E.U16.CONSTANT R8, desc[UR4][R4.64+0x4] ;
        /*00e0*/                   LDG.E.ENL2.256 R8, R12, desc[UR4][R4.64] ;
        /*0300*/              @P1  STG.E.U8 desc[UR6][R2.64+0xa], R6 ;
        /*0310*/                   LDGSTS.E.BYPASS.128 [R7+0x800], desc[UR4][R2.64+0x20] ;";
        let expected = [
            (Load, 16, "R4.64".into(), 4),
            (Load, 256, "R4.64".into(), 0),
            (Store, 8, "R2.64".into(), 10),
            (Load, 128, "R2.64".into(), 32),
        ];
        assert_eq!(found(sm_100), expected);
    }

    #[test]
    fn a_loop_that_holds_another_is_not_innermost() {
        let listing = "\
.L_x_0:
        /*0010*/                   LDG.E R4, desc[UR4][R4.64] ;
.L_x_1:
        /*0020*/                   LDG.E.128 R8, desc[UR4][R6.64] ;
        /*0030*/              @P2  BRA `(.L_x_1) ;
        /*0040*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0070*/              @P1  BRA `(.L_x_0) ;
        /*0080*/              @P1  BRA `(.L_x_3) ;
.L_x_2:
        /*0090*/                   BRA `(.L_x_2);
.L_x_3:
        /*00a0*/                   EXIT ;";
        let accesses = parse(listing);
        assert_eq!(accesses.all.len(), 4);
        assert_eq!(accesses.loops, [1..3, 4..4]);
    }

    #[test]
    fn products_of_matrix_units_are_counted() {
        let listing = "\
        /*0410*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0420*/              @!P0 HMMA.16816.F32 R4, R8, R14, R4 ;
        /*0430*/                   FFMA R4, R8, R12, R4 ;
        /*0440*/                   LDSM.16.M88.4 R8, [R2] ;";
        assert_eq!(products(listing), 2);
    }
}
