//! Checks compiled kernels for defects.

use crate::aims::Aim;
use crate::arch::Arch;
use crate::bound::Bound;
use crate::sass::{Access, Accesses, Direction};
use crate::toolchain::CompiledKernel;

/// Bits of the widest access that every architecture supports.
const WIDE: u32 = 128;

/// The number of bytes that most kernels may spill. The assembler trades a few registers for one more cube on a
/// multiprocessor. A kernel that streams rows or uses tensor cores must not spill.
const TILES_MAY_SPILL: u32 = 16;

/// A failed check.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum KernelDefect {
    /// The kernel spills registers. The numbers are the bytes stored and loaded.
    #[error("spills registers: {0} bytes stored, {1} loaded")]
    Spills(u32, u32),
    /// The kernel streams rows and keeps an array in local memory. The number is the bytes per unit. The cause is an
    /// index that is not known at compile time, as in a loop that is not unrolled.
    #[error("streams rows, and keeps {0} bytes of arrays in local memory, not in registers")]
    LocalArray(u32),
    /// A cube needs more shared memory than the architecture provides. The numbers are the needed and the available
    /// bytes.
    #[error("needs {0} bytes of shared memory: expected at most {1}")]
    SharedMemory(usize, usize),
    /// The kernel streams rows, and no load is 128 bits wide.
    #[error("streams rows, and no load is {WIDE} bits wide")]
    NoWideLoad,
    /// The kernel streams rows, and all accesses of one innermost loop are narrow. The number is the position of the
    /// loop among the loops that access memory.
    #[error("streams rows, and loop {0} has no access that is {WIDE} bits wide")]
    NarrowLoop(usize),
    /// The kernel is declared to use tensor cores, but has no matrix instruction.
    #[error("multiplies by matrix units, but has no matrix instruction")]
    NoMatrixProducts,
    /// The kernel streams rows and accesses 128 adjacent bits in parts. The access is the first such access.
    #[error("streams rows, and {WIDE} bits side by side are {0}")]
    Pieces(Access),
    /// The kernel streams rows, and its bound is below the target. Both are fractions of the copy bandwidth.
    #[error(
        "streams rows, and cannot exceed {work:.2} of copy bandwidth for its work ({pipe}), {wait:.2} for \
         waiting: expected {1:.2}",
        work = .0.work, pipe = .0.pipe.name(), wait = .0.wait
    )]
    Bound(Box<Bound>, f64),
}

/// The requirements of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelRequirements {
    /// The kernel streams rows of memory.
    pub streams: bool,
    /// The kernel uses tensor cores.
    pub multiplies: bool,
}

/// Returns all failed checks of a kernel. `shared` is the shared memory of the kernel in bytes.
pub fn check_kernel(
    compiled: &CompiledKernel,
    shared: usize,
    requirements: KernelRequirements,
    arch: Arch,
) -> Vec<KernelDefect> {
    let streams = requirements.streams;
    let mut defects = Vec::new();
    let (stores, loads) = (compiled.usage.spill_stores, compiled.usage.spill_loads);
    let allowed = if streams || requirements.multiplies {
        0
    } else {
        TILES_MAY_SPILL
    };
    if stores.max(loads) > allowed {
        defects.push(KernelDefect::Spills(stores, loads));
    } else if streams && compiled.usage.stack > 0 {
        defects.push(KernelDefect::LocalArray(compiled.usage.stack));
    }
    if shared > arch.shared_memory {
        defects.push(KernelDefect::SharedMemory(shared, arch.shared_memory));
    }
    if requirements.multiplies && compiled.products == 0 {
        defects.push(KernelDefect::NoMatrixProducts);
    }
    if streams {
        defects.extend(narrow(&compiled.accesses));
    }
    defects
}

/// Compares a bound with its target.
pub fn check_bound(bound: &Bound, aim: &Aim) -> Option<KernelDefect> {
    let is_under = bound.share() < aim.share && aim.excuse.is_none();
    is_under.then_some(KernelDefect::Bound(Box::new(bound.clone()), aim.share))
}

/// Checks for narrow accesses. One value per row may be narrow, but rows may not. Narrow rows appear as kernels
/// without a wide load, as loops with only narrow accesses, or as vectors that are accessed in parts.
fn narrow(accesses: &Accesses) -> Vec<KernelDefect> {
    let is_wide = |access: &Access| access.bits >= WIDE;
    let wide_load = |access: &Access| access.direction == Direction::Load && is_wide(access);
    let mut defects = Vec::new();
    if !accesses.all.iter().any(wide_load) {
        defects.push(KernelDefect::NoWideLoad);
    }
    let loops = accesses.loops.iter().filter(|range| !range.is_empty());
    for (number, range) in (1..).zip(loops) {
        if !accesses.all[range.clone()].iter().any(is_wide) {
            defects.push(KernelDefect::NarrowLoop(number));
        }
    }
    defects.extend(pieces(accesses).cloned().map(KernelDefect::Pieces));
    defects
}

/// Returns the first access to a vector that is accessed in parts. Stores count in innermost loops only: elsewhere
/// they may be adjacent values of a row.
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
    use crate::bound::{MachineCode, Pipe};
    use crate::{sass, usage};

    const CLEAN: &str = "\
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 22 registers, used 0 barriers
";

    /// A row with one additional value per row.
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

    fn defects(report: &str, listing: &str, shared: usize, streams: bool) -> Vec<String> {
        let compiled = CompiledKernel {
            usage: usage::parse(report).unwrap(),
            accesses: sass::parse(listing),
            products: sass::products(listing),
            code: MachineCode::parse(listing),
        };
        let requirements = KernelRequirements {
            streams,
            ..KernelRequirements::default()
        };
        let defects = check_kernel(&compiled, shared, requirements, ARCHS[1]);
        defects.iter().map(KernelDefect::to_string).collect()
    }

    #[test]
    fn wide_rows_with_a_value_each_are_right() {
        assert!(defects(CLEAN, WIDE_ROW, 232_448, true).is_empty());
    }

    #[test]
    fn vectors_accessed_in_parts_are_found() {
        let loaded = "streams rows, and 128 bits side by side are loaded 32 at a time ([R4.64+16])";
        assert_eq!(defects(CLEAN, PIECES, 0, true), [loaded]);
        let three = PIECES.replace("R4.64+0x14", "R4.64+0x20");
        assert!(defects(CLEAN, &three, 0, true).is_empty());
        let stored = "streams rows, and 128 bits side by side are stored 64 at a time ([R2.64+0])";
        let once = [WIDE_ROW, STORED_IN_PIECES].concat();
        assert!(defects(CLEAN, &once, 0, true).is_empty());
        let looped = [
            ".L_x_0:\n",
            &once,
            "        /*0320*/  @!P0 BRA `(.L_x_0) ;\n",
        ]
        .concat();
        assert_eq!(defects(CLEAN, &looped, 0, true), [stored]);
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
        assert_eq!(defects(CLEAN, listing, 0, true), [no_load, in_loop]);
        assert_eq!(
            defects(CLEAN, &[WIDE_ROW, listing].concat(), 0, true),
            [in_loop]
        );
    }

    #[test]
    fn only_streaming_kernels_must_be_wide_and_spill_nothing_at_all() {
        assert!(defects(CLEAN, PIECES, 0, false).is_empty());
        let few = CLEAN.replace("0 bytes spill loads", "16 bytes spill loads");
        assert!(defects(&few, PIECES, 0, false).is_empty());
        let expected = ["spills registers: 0 bytes stored, 16 loaded"];
        assert_eq!(defects(&few, WIDE_ROW, 0, true), expected);
        let spilling = CLEAN.replace("0 bytes spill loads", "24 bytes spill loads");
        let expected = ["spills registers: 0 bytes stored, 24 loaded"];
        assert_eq!(defects(&spilling, PIECES, 0, false), expected);
    }

    #[test]
    fn a_streaming_kernel_keeps_its_arrays_in_registers() {
        let report = CLEAN.replace("0 bytes stack frame", "64 bytes stack frame");
        let expected =
            ["streams rows, and keeps 64 bytes of arrays in local memory, not in registers"];
        assert_eq!(defects(&report, WIDE_ROW, 0, true), expected);
        assert!(defects(&report, WIDE_ROW, 0, false).is_empty());
    }

    #[test]
    fn shared_memory_has_the_limit_of_the_architecture() {
        let expected = ["needs 232449 bytes of shared memory: expected at most 232448"];
        assert_eq!(defects(CLEAN, WIDE_ROW, 232_449, true), expected);
    }

    #[test]
    fn a_kernel_of_matrix_products_has_them_and_spills_nothing_at_all() {
        let defects = |report: &str, listing: &str| {
            let compiled = CompiledKernel {
                usage: usage::parse(report).unwrap(),
                accesses: sass::parse(listing),
                products: sass::products(listing),
                code: MachineCode::parse(listing),
            };
            let requirements = KernelRequirements {
                multiplies: true,
                ..KernelRequirements::default()
            };
            check_kernel(&compiled, 0, requirements, ARCHS[1])
        };
        assert_eq!(defects(CLEAN, WIDE_ROW), [KernelDefect::NoMatrixProducts]);
        let product = "        /*0410*/                   HMMA.16816.F32 R4, R8, R12, R4 ;\n";
        let products = [WIDE_ROW, product].concat();
        assert!(defects(CLEAN, &products).is_empty());
        let spilling = CLEAN.replace("0 bytes spill loads", "4 bytes spill loads");
        assert_eq!(defects(&spilling, &products), [KernelDefect::Spills(0, 4)]);
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
        assert_eq!(check_bound(&bound(0.9, 2.0), &aim(None)), None);
        for low in [bound(0.89, 2.0), bound(2.0, 0.89)] {
            let fault = KernelDefect::Bound(Box::new(low.clone()), 0.9);
            assert_eq!(check_bound(&low, &aim(None)), Some(fault));
            assert_eq!(check_bound(&low, &aim(Some("why"))), None);
        }
    }
}
