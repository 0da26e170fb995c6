//! Writes the calls to the device, and the numbers of each launch, as lines of JSON to a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::errors::say;
use super::launch::KernelLaunch;
use super::state::DriverState;
use super::transfers::{Copy, CopyEndpoint, FillPattern};
use crate::machine::{Counts, Kind, LANES};

impl DriverState {
    /// Appends a line if a file of counts was requested.
    pub fn count(&self, line: impl FnOnce() -> Value) {
        if let Some(file) = &self.options.counts {
            append(file, &line());
        }
    }

    /// Counts a call of the driver in which the host waits for the device.
    pub fn waits(&self, call: &str) {
        self.count(|| json!({ "wait": call }));
    }
}

fn append(file: &Path, line: &Value) {
    let line = format!("{line}\n");
    let opened = OpenOptions::new().create(true).append(true).open(file);
    // The line is written with one call, so that lines of several processes do not mix.
    if let Err(error) = opened.and_then(|mut opened| opened.write_all(line.as_bytes())) {
        say(&format!("{}: {error}", file.display()));
    }
}

/// Returns the line of a copy.
pub(super) fn copied(copy: &Copy) -> Value {
    let letter = |end: &CopyEndpoint| match end {
        CopyEndpoint::Device(_) => 'd',
        CopyEndpoint::Host(_) | CopyEndpoint::Staged(_) => 'h',
    };
    let way = format!("{}to{}", letter(&copy.from), letter(&copy.to));
    json!({ "copy": way, "bytes": copy.width * copy.height })
}

/// Returns the line of a fill.
pub(super) fn filled(fill: &FillPattern) -> Value {
    json!({ "fill": fill.pattern.len() * fill.count })
}

/// Returns the line of a launch.
pub(super) fn launched(launched: &KernelLaunch, counts: &Counts) -> Value {
    let of = |kind: Kind| {
        (
            format!("{kind:?}").to_lowercase(),
            counts.instructions[kind as usize],
        )
    };
    let instructions = Kind::ALL.into_iter().map(of);
    let instructions: Map<_, _> = instructions
        .filter(|(_, count)| *count > 0)
        .map(|(kind, count)| (kind, count.into()))
        .collect();
    let product = |sizes: [u32; 3]| sizes.into_iter().map(u64::from).product::<u64>();
    let both = |(read, written)| json!({ "read": read, "written": written });
    json!({
        "kernel": launched.program.name,
        "grid": launched.grid,
        "block": launched.block,
        "shared": launched.program.shared + launched.dynamic_shared,
        "warps": product(launched.grid) * product(launched.block).div_ceil(LANES as u64),
        "longest_warp": counts.longest_warp,
        "instructions": instructions,
        "matrix_flops": counts.matrix_flops,
        "global_bytes": both(counts.global_bytes),
        "global_sectors": both(counts.global_sectors),
        "touched_sectors": both(counts.touched_sectors),
        "bank_conflicts": counts.bank_conflicts,
        "shared_wavefronts": counts.shared_wavefronts,
        "atomics": counts.atomics,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_line_has_every_number() {
        let launch = KernelLaunch {
            program: Arc::new(crate::testing::kernel("")),
            grid: [1, 2, 3],
            block: [33, 1, 1],
            parameters: Vec::new(),
            dynamic_shared: 64,
        };
        let mut counts = Counts {
            global_bytes: (4, 8),
            global_sectors: (1, 2),
            bank_conflicts: 5,
            atomics: 6,
            touched_sectors: (7, 8),
            shared_wavefronts: 9,
            matrix_flops: 10,
            longest_warp: 11,
            ..Counts::default()
        };
        counts.instruction(Kind::Control);
        let expected = json!({
            "kernel": "tested", "grid": [1, 2, 3], "block": [33, 1, 1], "shared": 64,
            "warps": 12, "longest_warp": 11, "matrix_flops": 10, "shared_wavefronts": 9,
            "instructions": { "control": 1 },
            "global_bytes": { "read": 4, "written": 8 },
            "global_sectors": { "read": 1, "written": 2 },
            "touched_sectors": { "read": 7, "written": 8 },
            "bank_conflicts": 5, "atomics": 6,
        });
        assert_eq!(launched(&launch, &counts), expected);
    }
}
