//! What is wrong with a kernel.

use std::fmt;

use crate::aims::Aim;
use crate::arch::Arch;
use crate::bound::Bound;
use crate::sass::{Access, Accesses, Direction};
use crate::toolchain::Built;

/// Bits of the widest access that every architecture has.
const WIDE: u32 = 128;

/// Bytes that a kernel of tiles may spill: the assembler gives away a few registers for one more cube
/// on a multiprocessor. One that streams rows may spill none.
const TILES_MAY_SPILL: u32 = 16;

/// Something wrong with a kernel.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// There are not enough registers; bytes that are stored and loaded for want of them.
    Spills(u32, u32),
    /// The kernel streams rows, and keeps an array in local memory; bytes per unit. An index that is
    /// not known when the kernel is compiled does this, as a loop that is not unrolled has it.
    LocalArray(u32),
    /// A cube wants more shared memory than there is; both in bytes.
    SharedMemory(usize, usize),
    /// The kernel streams rows, and nothing is loaded 128 bits at a time.
    NoWideLoad,
    /// The kernel streams rows, and this innermost loop of it (its place among the loops that
    /// access memory) has only narrow accesses.
    NarrowLoop(usize),
    /// The kernel multiplies by matrix units, and has no instruction of theirs.
    NoMatrixProducts,
    /// The kernel streams rows, and takes 128 bits that stand side by side in pieces; the first.
    Pieces(Access),
    /// The kernel streams rows, and its bound is under what is aimed at; both as shares of copy
    /// bandwidth.
    Bound(Box<Bound>, f64),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Spills(stores, loads) => {
                write!(f, "spills registers: {stores} bytes stored, {loads} loaded")
            }
            Fault::LocalArray(bytes) => write!(
                f,
                "streams rows, and keeps {bytes} bytes of arrays in local memory, not in registers"
            ),
            Fault::SharedMemory(wanted, there) => {
                write!(
                    f,
                    "{wanted} bytes of shared memory, of which there are {there}"
                )
            }
            Fault::NoWideLoad => write!(f, "streams rows, and no load is {WIDE} bits wide"),
            Fault::NarrowLoop(number) => write!(
                f,
                "streams rows, and loop {number} has no access that is {WIDE} bits wide"
            ),
            Fault::Bound(bound, aim) => write!(
                f,
                "streams rows, and cannot exceed {:.2} of copy bandwidth for its work ({}), {:.2} for \
                 waiting; {aim:.2} is aimed at",
                bound.work,
                bound.pipe.name(),
                bound.wait
            ),
            Fault::NoMatrixProducts => {
                write!(
                    f,
                    "multiplies by matrix units, and has no instruction of theirs"
                )
            }
            Fault::Pieces(access) => {
                let done = match access.direction {
                    Direction::Load => "loaded",
                    Direction::Store => "stored",
                };
                write!(
                    f,
                    "streams rows, and {WIDE} bits side by side are {done} {} at a time ([{}+{}])",
                    access.bits, access.base, access.offset
                )
            }
        }
    }
}

/// What a kernel is for, which says what it must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purpose {
    /// It streams rows of memory.
    pub streams: bool,
    /// It multiplies by matrix units.
    pub multiplies: bool,
}

/// All that is wrong with a kernel. `shared` is its shared memory in bytes.
pub fn judge(built: &Built, shared: usize, purpose: Purpose, arch: Arch) -> Vec<Fault> {
    let streams = purpose.streams;
    let mut faults = Vec::new();
    let (stores, loads) = (built.usage.spill_stores, built.usage.spill_loads);
    let allowed = if streams { 0 } else { TILES_MAY_SPILL };
    if stores.max(loads) > allowed {
        faults.push(Fault::Spills(stores, loads));
    } else if streams && built.usage.stack > 0 {
        faults.push(Fault::LocalArray(built.usage.stack));
    }
    if shared > arch.shared_memory {
        faults.push(Fault::SharedMemory(shared, arch.shared_memory));
    }
    if purpose.multiplies && built.products == 0 {
        faults.push(Fault::NoMatrixProducts);
    }
    if streams {
        faults.extend(narrow(&built.accesses));
    }
    faults
}

/// What is wrong with a bound.
pub fn judge_bound(bound: &Bound, aim: &Aim) -> Option<Fault> {
    let is_under = bound.share() < aim.share && aim.excuse.is_none();
    is_under.then_some(Fault::Bound(Box::new(bound.clone()), aim.share))
}

/// A value per row may be narrow. Rows may not, and this is how they show: there is no wide load at
/// all, or a loop has narrow accesses only, or the parts of a vector are taken one by one.
fn narrow(accesses: &Accesses) -> Vec<Fault> {
    let is_wide = |access: &Access| access.bits >= WIDE;
    let wide_load = |access: &Access| access.direction == Direction::Load && is_wide(access);
    let mut faults = Vec::new();
    if !accesses.all.iter().any(wide_load) {
        faults.push(Fault::NoWideLoad);
    }
    let loops = accesses.loops.iter().filter(|range| !range.is_empty());
    for (number, range) in (1..).zip(loops) {
        if !accesses.all[range.clone()].iter().any(is_wide) {
            faults.push(Fault::NarrowLoop(number));
        }
    }
    faults.extend(pieces(accesses).cloned().map(Fault::Pieces));
    faults
}

/// An access with which a vector begins that is taken in pieces. Stores count in innermost loops
/// only: elsewhere they may be values of a row that stand side by side.
fn pieces(accesses: &Accesses) -> Option<&Access> {
    let loops = accesses.loops.iter();
    let in_loops = loops.flat_map(|range| &accesses.all[range.clone()]);
    let loads = accesses
        .all
        .iter()
        .filter(|a| a.direction == Direction::Load);
    loads.chain(in_loops).find(|access| {
        let width = access.bits / 8;
        let pieces = (WIDE / access.bits).max(1);
        let is_there = |piece: u32| {
            let offset = access.offset + i64::from(width * piece);
            accesses.all.contains(&Access {
                offset,
                ..(*access).clone()
            })
        };
        pieces > 1 && (1..pieces).all(is_there)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ARCHS;
    use crate::bound::{Code, Pipe};
    use crate::{sass, usage};

    const CLEAN: &str = "\
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers
";

    /// A row with one value of its own.
    const WIDE_ROW: &str = "\
        /*00c0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64] ;
        /*00f0*/                   LDG.E.CONSTANT R0, desc[UR4][R10.64] ;
        /*0310*/                   STG.E.128 desc[UR4][R2.64], R4 ;
";

    /// Four values of a row, and a vector whose four parts are loaded in another order.
    const PIECES: &str = "\
        /*00a0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R6.64] ;
        /*00c0*/                   LDG.E.CONSTANT R0, desc[UR4][R4.64+0x10] ;
        /*00d0*/                   LDG.E.CONSTANT R8, desc[UR4][R4.64+0x18] ;
        /*00e0*/                   LDG.E.CONSTANT R9, desc[UR4][R4.64+0x1c] ;
        /*0100*/                   LDG.E.CONSTANT R6, desc[UR4][R4.64+0x14] ;
";

    const STORED_IN_PIECES: &str = "\
        /*02d0*/                   STG.E.64 desc[UR4][R2.64], R0 ;
        /*02e0*/                   STG.E.64 desc[UR4][R2.64+0x8], R4 ;
";

    fn faults(report: &str, listing: &str, shared: usize, streams: bool) -> Vec<String> {
        let built = Built {
            usage: usage::parse(report).unwrap(),
            accesses: sass::parse(listing),
            products: sass::products(listing),
            code: Code::parse(listing),
        };
        let purpose = Purpose {
            streams,
            ..Purpose::default()
        };
        let faults = judge(&built, shared, purpose, ARCHS[1]);
        faults.iter().map(Fault::to_string).collect()
    }

    #[test]
    fn wide_rows_with_a_value_each_are_right() {
        assert!(faults(CLEAN, WIDE_ROW, 232_448, true).is_empty());
    }

    #[test]
    fn vectors_in_pieces_are_found() {
        let loaded = "streams rows, and 128 bits side by side are loaded 32 at a time ([R4.64+16])";
        assert_eq!(faults(CLEAN, PIECES, 0, true), [loaded]);
        let three = PIECES.replace("R4.64+0x14", "R4.64+0x20");
        assert!(faults(CLEAN, &three, 0, true).is_empty());
        let stored = "streams rows, and 128 bits side by side are stored 64 at a time ([R2.64+0])";
        let once = [WIDE_ROW, STORED_IN_PIECES].concat();
        assert!(faults(CLEAN, &once, 0, true).is_empty());
        let looped = [
            ".L_x_0:\n",
            &once,
            "        /*0320*/  @!P0 BRA `(.L_x_0) ;\n",
        ]
        .concat();
        assert_eq!(faults(CLEAN, &looped, 0, true), [stored]);
    }

    #[test]
    fn narrow_rows_are_found() {
        let listing = "\
.L_x_0:
        /*00c0*/                   LDG.E.64 R4, desc[UR4][R4.64] ;
        /*0310*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0320*/              @!P0 BRA `(.L_x_0) ;
";
        let no_load = "streams rows, and no load is 128 bits wide";
        let in_loop = "streams rows, and loop 1 has no access that is 128 bits wide";
        assert_eq!(faults(CLEAN, listing, 0, true), [no_load, in_loop]);
        assert_eq!(
            faults(CLEAN, &[WIDE_ROW, listing].concat(), 0, true),
            [in_loop]
        );
    }

    #[test]
    fn only_streaming_kernels_must_be_wide_and_spill_nothing_at_all() {
        assert!(faults(CLEAN, PIECES, 0, false).is_empty());
        let few = CLEAN.replace("0 bytes spill loads", "16 bytes spill loads");
        assert!(faults(&few, PIECES, 0, false).is_empty());
        let expected = ["spills registers: 0 bytes stored, 16 loaded"];
        assert_eq!(faults(&few, WIDE_ROW, 0, true), expected);
        let spilling = CLEAN.replace("0 bytes spill loads", "24 bytes spill loads");
        let expected = ["spills registers: 0 bytes stored, 24 loaded"];
        assert_eq!(faults(&spilling, PIECES, 0, false), expected);
    }

    #[test]
    fn a_streaming_kernel_keeps_its_arrays_in_registers() {
        let report = CLEAN.replace("0 bytes stack frame", "64 bytes stack frame");
        let expected =
            ["streams rows, and keeps 64 bytes of arrays in local memory, not in registers"];
        assert_eq!(faults(&report, WIDE_ROW, 0, true), expected);
        assert!(faults(&report, WIDE_ROW, 0, false).is_empty());
    }

    #[test]
    fn shared_memory_has_the_limit_of_the_architecture() {
        let expected = ["232449 bytes of shared memory, of which there are 232448"];
        assert_eq!(faults(CLEAN, WIDE_ROW, 232_449, true), expected);
    }

    #[test]
    fn a_kernel_of_matrix_products_has_them() {
        let faults = |listing: &str| {
            let built = Built {
                usage: usage::parse(CLEAN).unwrap(),
                accesses: sass::parse(listing),
                products: sass::products(listing),
                code: Code::parse(listing),
            };
            let purpose = Purpose {
                multiplies: true,
                ..Purpose::default()
            };
            judge(&built, 0, purpose, ARCHS[1])
        };
        assert_eq!(faults(WIDE_ROW), [Fault::NoMatrixProducts]);
        let product = "        /*0410*/                   HMMA.16816.F32 R4, R8, R12, R4 ;\n";
        assert!(faults(&[WIDE_ROW, product].concat()).is_empty());
    }

    #[test]
    fn a_bound_under_the_aim_is_a_fault_unless_it_is_excused() {
        let bound = |work, wait| Bound {
            work,
            pipe: Pipe::Alu,
            wait,
            planes: 64,
            waits: 1.0,
            bytes: 16.0,
            path: vec![],
        };
        let aim = |excuse| Aim {
            of: "",
            with: "",
            share: 0.9,
            cached: &[],
            excuse,
        };
        assert_eq!(judge_bound(&bound(0.9, 2.0), &aim(None)), None);
        for low in [bound(0.89, 2.0), bound(2.0, 0.89)] {
            let fault = Fault::Bound(Box::new(low.clone()), 0.9);
            assert_eq!(judge_bound(&low, &aim(None)), Some(fault));
            assert_eq!(judge_bound(&low, &aim(Some("why"))), None);
        }
    }
}
