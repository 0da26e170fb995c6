//! The resource usage of a kernel, parsed from the output of `ptxas -v`.

/// Resources of a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Registers per unit.
    pub registers: u32,
    /// Bytes of local memory per unit: arrays that are not kept in registers, and spilled values.
    pub stack: u32,
    /// Bytes stored because of register spills.
    pub spill_stores: u32,
    /// Bytes loaded because of register spills.
    pub spill_loads: u32,
    /// Bytes of static shared memory per cube.
    pub shared: usize,
}

/// Parses the report of `ptxas -v` on a file with one kernel. Returns `None` if the report has no registers.
///
/// Functions that were not inlined are reported separately. Their stacks and spills are added, and the number of
/// registers is the maximum.
pub fn parse(report: &str) -> Option<Usage> {
    let mut usage = Usage::default();
    let mut found = false;
    for line in report.lines() {
        for part in line.split(',') {
            let number = |unit: &str| number_before(part, unit);
            usage.stack += number("bytes stack frame").unwrap_or(0);
            usage.spill_stores += number("bytes spill stores").unwrap_or(0);
            usage.spill_loads += number("bytes spill loads").unwrap_or(0);
            usage.shared += number("bytes smem").unwrap_or(0) as usize;
            if let Some(registers) = number("registers") {
                usage.registers = usage.registers.max(registers);
                found = true;
            }
        }
    }
    found.then_some(usage)
}

/// Returns the number before `unit` at the end of `part`.
fn number_before(part: &str, unit: &str) -> Option<u32> {
    let before = part.trim().strip_suffix(unit)?;
    before.split_whitespace().next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPILLS: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spill' for 'sm_80'
ptxas info    : Function properties for spill
    520 bytes stack frame, 1064 bytes spill stores, 1072 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 520 bytes cumulative stack size, 256 bytes smem, 372 bytes cmem[0]
ptxas info    : Compile time = 163.169 ms
";

    const CALLED: &str = "\
ptxas info    : Function properties for __internal_trig_reduction_slowpathf
    28 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
";

    #[test]
    fn everything_of_a_report_is_read() {
        let expected = Usage {
            registers: 32,
            stack: 520,
            spill_stores: 1064,
            spill_loads: 1072,
            shared: 256,
        };
        assert_eq!(parse(SPILLS), Some(expected));
    }

    #[test]
    fn functions_that_were_not_inlined_count() {
        let usage = parse(&[CALLED, SPILLS].concat()).unwrap();
        assert_eq!(
            (usage.stack, usage.spill_stores, usage.spill_loads),
            (548, 1068, 1080)
        );
    }

    #[test]
    fn a_report_without_registers_is_none() {
        assert_eq!(parse(CALLED), None);
        assert_eq!(
            parse("ptxas fatal   : Unresolved extern function 'f'"),
            None
        );
    }
}
