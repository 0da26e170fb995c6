//! The report on all kernels.

use crate::arch::Arch;
use crate::sass::{Access, Accesses, Direction};
use crate::toolchain::Built;
use crate::verdict::Fault;

/// One kernel on one architecture.
pub struct Row {
    /// The kernel's name.
    pub name: String,
    /// What it was compiled for.
    pub arch: Arch,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of a kernel.
pub enum Outcome {
    /// It has no machine code; why.
    NotBuilt(String),
    /// It has machine code.
    Judged {
        /// Its code.
        built: Built,
        /// Its shared memory in bytes: what the code fixes and what the launch adds.
        shared: usize,
        /// What is wrong with it.
        faults: Vec<Fault>,
    },
}

impl Row {
    /// Whether the kernel has machine code with which nothing is wrong.
    pub fn passed(&self) -> bool {
        matches!(&self.outcome, Outcome::Judged { faults, .. } if faults.is_empty())
    }

    /// Everything wrong with the kernel, a line each; the first names it.
    pub fn failure(&self) -> Option<String> {
        let reasons = match &self.outcome {
            Outcome::NotBuilt(reason) => reason.trim_end().replace('\n', "\n    "),
            Outcome::Judged { faults, .. } => {
                let lines: Vec<_> = faults.iter().map(Fault::to_string).collect();
                lines.join("\n    ")
            }
        };
        let title = format!("{} for {}", self.name, self.arch.name);
        (!self.passed()).then(|| format!("{title}\n    {reasons}"))
    }

    fn cells(&self) -> [String; COLUMNS] {
        let mut cells = [const { String::new() }; COLUMNS];
        cells[0] = self.name.clone();
        cells[1] = self.arch.name.into();
        match &self.outcome {
            Outcome::NotBuilt(_) => cells[COLUMNS - 1] = "NOT BUILT".into(),
            Outcome::Judged { built, shared, .. } => {
                let usage = &built.usage;
                cells[2] = usage.registers.to_string();
                cells[3] = format!("{}/{}", usage.spill_stores, usage.spill_loads);
                cells[4] = usage.stack.to_string();
                cells[5] = shared.to_string();
                cells[6] = widths(&built.accesses, Direction::Load);
                cells[7] = widths(&built.accesses, Direction::Store);
                cells[8] = if self.passed() { "ok" } else { "FAILED" }.into();
            }
        }
        cells
    }
}

const COLUMNS: usize = 9;

const TITLES: [&str; COLUMNS] = [
    "kernel",
    "arch",
    "registers",
    "spilled",
    "stack",
    "shared",
    "loads",
    "stores",
    "result",
];

/// How many instructions access memory with how many bits, the widest first: `2x128 1x32`.
fn widths(accesses: &Accesses, direction: Direction) -> String {
    let of = |access: &&Access| access.direction == direction;
    let mut bits: Vec<_> = accesses.all.iter().filter(of).map(|a| a.bits).collect();
    bits.sort_unstable_by(|a, b| b.cmp(a));
    let groups = bits.chunk_by(|a, b| a == b);
    let groups: Vec<_> = groups
        .map(|same| format!("{}x{}", same.len(), same[0]))
        .collect();
    match groups.is_empty() {
        true => "-".into(),
        false => groups.join(" "),
    }
}

/// The rows as a table with a line of titles.
pub fn render(rows: &[Row]) -> String {
    let mut lines = vec![TITLES.map(String::from)];
    lines.extend(rows.iter().map(Row::cells));
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].len())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    let mut table = String::new();
    for line in &lines {
        let cells = line.iter().zip(widths).enumerate();
        let cells = cells.map(|(column, (cell, width))| match (2..=5).contains(&column) {
            true => format!("{cell:>width$}"),
            false => format!("{cell:width$}"),
        });
        table += cells.collect::<Vec<_>>().join("  ").trim_end();
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::ARCHS;
    use crate::sass;
    use crate::usage::Usage;

    fn row(name: &str, listing: &str, faults: Vec<Fault>) -> Row {
        let usage = Usage {
            registers: 22,
            ..Usage::default()
        };
        Row {
            name: name.into(),
            arch: ARCHS[1],
            outcome: Outcome::Judged {
                built: Built {
                    usage,
                    accesses: sass::parse(listing),
                    products: 0,
                },
                shared: 1024,
                faults,
            },
        }
    }

    #[test]
    fn the_table_lists_every_kernel_and_the_failures_say_why() {
        let listing = "\
        /*00c0*/                   LDG.E.CONSTANT R0, desc[UR4][R10.64] ;
        /*00d0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64] ;
        /*00f0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64+0x400] ;
";
        let refused = Row {
            name: "rope/f32".into(),
            arch: ARCHS[0],
            outcome: Outcome::NotBuilt("NVRTC: no\nline 3\n".into()),
        };
        let rows = [
            row("norm/forward/bf16", listing, vec![]),
            row(
                "norm/bf16",
                "",
                vec![Fault::Spills(4, 8), Fault::NoWideLoad],
            ),
            refused,
        ];
        let expected = "\
kernel             arch    registers  spilled  stack  shared  loads       stores  result
norm/forward/bf16  sm_90a         22      0/0      0    1024  2x128 1x32  -       ok
norm/bf16          sm_90a         22      0/0      0    1024  -           -       FAILED
rope/f32           sm_80                                                          NOT BUILT
";
        assert_eq!(render(&rows), expected);
        let failures: Vec<_> = rows.iter().filter_map(Row::failure).collect();
        assert_eq!(
            failures,
            [
                "norm/bf16 for sm_90a\n    spills registers: 4 bytes stored, 8 loaded\n    \
                 streams rows, and no load is 128 bits wide",
                "rope/f32 for sm_80\n    NVRTC: no\n    line 3",
            ]
        );
    }
}
