//! The numbers of each launch, as lines of JSON in a file.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::errors::say;
use super::launch::KernelLaunch;
use crate::machine::{Counts, Kind};

/// Appends the line of one launch.
pub(super) fn append(file: &Path, launched: &KernelLaunch, counts: &Counts) {
    let line = format!("{}\n", line(launched, counts));
    let opened = OpenOptions::new().create(true).append(true).open(file);
    // At once: lines of several processes do not mix.
    if let Err(error) = opened.and_then(|mut opened| opened.write_all(line.as_bytes())) {
        say(&format!("{}: {error}", file.display()));
    }
}

fn line(launched: &KernelLaunch, counts: &Counts) -> Value {
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
    let both = |(read, written)| json!({ "read": read, "written": written });
    json!({
        "kernel": launched.program.name,
        "grid": launched.grid,
        "block": launched.block,
        "shared": launched.program.shared + launched.dynamic_shared,
        "instructions": instructions,
        "global_bytes": both(counts.global_bytes),
        "global_sectors": both(counts.global_sectors),
        "touched_sectors": both(counts.touched_sectors),
        "bank_conflicts": counts.bank_conflicts,
        "atomics": counts.atomics,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_line_has_every_number() {
        let launched = KernelLaunch {
            program: Arc::new(crate::testing::kernel("")),
            grid: [1, 2, 3],
            block: [32, 1, 1],
            parameters: Vec::new(),
            dynamic_shared: 64,
        };
        let mut counts = Counts {
            global_bytes: (4, 8),
            global_sectors: (1, 2),
            bank_conflicts: 5,
            atomics: 6,
            touched_sectors: (7, 8),
            ..Counts::default()
        };
        counts.instruction(Kind::Control);
        let expected = json!({
            "kernel": "tested", "grid": [1, 2, 3], "block": [32, 1, 1], "shared": 64,
            "instructions": { "control": 1 },
            "global_bytes": { "read": 4, "written": 8 },
            "global_sectors": { "read": 1, "written": 2 },
            "touched_sectors": { "read": 7, "written": 8 },
            "bank_conflicts": 5, "atomics": 6,
        });
        assert_eq!(line(&launched, &counts), expected);
    }
}
