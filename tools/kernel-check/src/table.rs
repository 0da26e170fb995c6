//! The report on all kernels.

use crate::aims::Aim;
use crate::arch::Arch;
use crate::bound::Bound;
use crate::checks::KernelDefect;
use crate::sass::{Access, Accesses, Direction};
use crate::toolchain::CompiledKernel;

/// A kernel on an architecture.
pub struct ReportRow {
    /// The name of the kernel.
    pub name: String,
    /// The architecture.
    pub arch: Arch,
    /// The result.
    pub outcome: KernelOutcome,
}

/// The result of a kernel.
pub enum KernelOutcome {
    /// Compilation failed, with this error.
    CompileFailed(String),
    /// The kernel was compiled and checked.
    Compiled {
        /// The compiled kernel.
        compiled: CompiledKernel,
        /// The shared memory in bytes: the sum of the static part and the part that the launch adds.
        shared: usize,
        /// The upper bound and the target of the speed, for a kernel that streams on an H200.
        bound: Option<(Bound, &'static Aim)>,
        /// The failed checks.
        defects: Vec<KernelDefect>,
    },
}

impl ReportRow {
    /// Returns whether the kernel was compiled and passed all checks.
    pub fn passed(&self) -> bool {
        matches!(&self.outcome, KernelOutcome::Compiled { defects, .. } if defects.is_empty())
    }

    /// Returns all failures of the kernel, one per line. The first line names the kernel.
    pub fn failure(&self) -> Option<String> {
        let reasons = match &self.outcome {
            KernelOutcome::CompileFailed(reason) => reason.trim_end().replace('\n', "\n    "),
            KernelOutcome::Compiled { defects, .. } => {
                let lines: Vec<_> = defects.iter().map(KernelDefect::to_string).collect();
                lines.join("\n    ")
            }
        };
        let title = format!("{} for {}", self.name, self.arch.name);
        (!self.passed()).then(|| format!("{title}\n    {reasons}"))
    }

    /// Returns one line with the reason why a bound below its target is accepted, or `None` if there is no such
    /// bound.
    pub fn excuse(&self) -> Option<String> {
        let KernelOutcome::Compiled { bound, .. } = &self.outcome else {
            return None;
        };
        let (bound, aim) = bound.as_ref()?;
        let reason = aim.excuse.filter(|_| bound.share() < aim.share)?;
        let (name, share) = (&self.name, bound.share());
        Some(format!(
            "{name} is bound to {share:.2}, which is accepted: {reason}"
        ))
    }

    fn cells(&self) -> [String; COLUMNS] {
        let mut cells = [const { String::new() }; COLUMNS];
        cells[0] = self.name.clone();
        cells[1] = self.arch.name.into();
        match &self.outcome {
            KernelOutcome::CompileFailed(_) => cells[COLUMNS - 1] = "NOT COMPILED".into(),
            KernelOutcome::Compiled {
                compiled,
                shared,
                bound,
                ..
            } => {
                let usage = &compiled.usage;
                cells[2] = usage.registers.to_string();
                cells[3] = format!("{}/{}", usage.spill_stores, usage.spill_loads);
                cells[4] = usage.stack.to_string();
                cells[5] = shared.to_string();
                cells[6] = widths(&compiled.accesses, Direction::Load);
                cells[7] = widths(&compiled.accesses, Direction::Store);
                if let Some((bound, aim)) = bound {
                    cells[8] = bound.planes.to_string();
                    cells[9] = format!("{:.2} {}", bound.work, bound.pipe.name());
                    cells[10] = format!("{:.2}", bound.wait);
                    cells[11] = format!("{:.2}", aim.share);
                }
                cells[COLUMNS - 1] = if self.passed() { "ok" } else { "FAILED" }.into();
            }
        }
        cells
    }
}

const COLUMNS: usize = 13;

const TITLES: [&str; COLUMNS] = [
    "kernel",
    "arch",
    "registers",
    "spilled",
    "stack",
    "shared",
    "loads",
    "stores",
    "planes",
    "work",
    "wait",
    "aim",
    "result",
];

/// Returns the numbers and widths of instructions that access memory, the widest first: `2x128 1x32`.
fn widths(accesses: &Accesses, direction: Direction) -> String {
    let of = |access: &&Access| access.direction == direction;
    let mut bits: Vec<_> = accesses.all.iter().filter(of).map(|a| a.bits).collect();
    bits.sort_unstable_by(|a, b| b.cmp(a));
    let groups = bits.chunk_by(|a, b| a == b);
    let groups: Vec<_> = groups
        .map(|same| format!("{}x{}", same.len(), same[0]))
        .collect();
    if groups.is_empty() {
        "-".into()
    } else {
        groups.join(" ")
    }
}

/// Returns the rows as a table with a title line.
pub fn render(rows: &[ReportRow]) -> String {
    let mut lines = vec![TITLES.map(String::from)];
    lines.extend(rows.iter().map(ReportRow::cells));
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
        let cells = cells.map(|(column, (cell, width))| {
            if matches!(column, 2..=5 | 8..=11) {
                format!("{cell:>width$}")
            } else {
                format!("{cell:width$}")
            }
        });
        table += cells.collect::<Vec<_>>().join("  ").trim_end();
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aims;
    use crate::arch::ARCHS;
    use crate::bound::{MachineCode, Pipe};
    use crate::sass;
    use crate::usage::Usage;

    fn row(name: &str, listing: &str, defects: Vec<KernelDefect>) -> ReportRow {
        let usage = Usage {
            registers: 22,
            ..Usage::default()
        };
        ReportRow {
            name: name.into(),
            arch: ARCHS[1],
            outcome: KernelOutcome::Compiled {
                compiled: CompiledKernel {
                    usage,
                    accesses: sass::parse(listing),
                    products: 0,
                    code: MachineCode::default(),
                },
                shared: 1024,
                bound: None,
                defects,
            },
        }
    }

    /// Returns a row of a kernel that streams and whose bound is `work`.
    fn bound(name: &str, work: f64) -> ReportRow {
        let mut row = row(name, "", vec![]);
        if let KernelOutcome::Compiled { bound, .. } = &mut row.outcome {
            let found = Bound {
                work,
                pipe: Pipe::Issue,
                wait: f64::INFINITY,
                planes: 48,
                waits: 0.0,
                bytes: 16.0,
                path: vec![],
            };
            *bound = aims::of(name).map(|aim| (found, aim));
        }
        row
    }

    #[test]
    fn the_table_lists_every_kernel_and_failures_have_reasons() {
        let listing = "\
        /*00c0*/                   LDG.E.CONSTANT R0, desc[UR4][R10.64] ;
        /*00d0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64] ;
        /*00f0*/                   LDG.E.128.CONSTANT R4, desc[UR4][R4.64+0x400] ;
";
        let refused = ReportRow {
            name: "rope/f32".into(),
            arch: ARCHS[0],
            outcome: KernelOutcome::CompileFailed("NVRTC: no\nline 3\n".into()),
        };
        let rows = [
            bound("activation/forward/f16/Gelu-8", 0.816),
            row("norm/forward/bf16", listing, vec![]),
            row(
                "norm/bf16",
                "",
                vec![KernelDefect::Spills(4, 8), KernelDefect::NoWideLoad],
            ),
            refused,
        ];
        let expected = "\
kernel                         arch    registers  spilled  stack  shared  loads       stores  planes        work  wait   aim  result
activation/forward/f16/Gelu-8  sm_90a         22      0/0      0    1024  -           -           48  0.82 issue   inf  0.90  ok
norm/forward/bf16              sm_90a         22      0/0      0    1024  2x128 1x32  -                                       ok
norm/bf16                      sm_90a         22      0/0      0    1024  -           -                                       FAILED
rope/f32                       sm_80                                                                                          NOT COMPILED
";
        assert_eq!(render(&rows), expected);
        let excuses: Vec<_> = rows.iter().filter_map(ReportRow::excuse).collect();
        assert_eq!(excuses.len(), 1);
        assert_eq!(bound("activation/forward/f16/Gelu-8", 0.9).excuse(), None);
        assert!(
            excuses[0]
                .starts_with("activation/forward/f16/Gelu-8 is bound to 0.82, which is accepted: ")
        );
        let failures: Vec<_> = rows.iter().filter_map(ReportRow::failure).collect();
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
