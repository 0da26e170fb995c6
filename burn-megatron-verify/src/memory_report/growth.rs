//! Detects memory that grows from step to step, and the places where it was allocated.

use std::collections::BTreeMap;
use std::fmt;

use super::{Meter, SMALLEST_GROWTH, heap};

/// Memory growth: memory that each step allocates and does not free.
#[derive(Clone, Debug, PartialEq)]
pub struct MemoryGrowth {
    /// The number of bytes that a step adds, as the median over the measured steps.
    pub bytes_per_step: u64,
    /// The places in the code that allocated the memory, which are known only on the CPU. Each entry contains a number
    /// of bytes and the functions that allocated them, innermost first. Only bytes that one step allocated and that
    /// were still allocated after the next step are counted. Functions of Burn and of the standard library are not
    /// listed. The largest entry comes first.
    pub places: Vec<(u64, String)>,
}

/// Prefixes of library functions that allocate on behalf of other code.
const LIBRARIES: [&str; 15] = [
    "std::",
    "core::",
    "alloc::",
    "burn::",
    "burn_",
    "rayon",
    "gemm",
    "hashbrown",
    "parking_lot",
    "__rust",
    "rust_",
    "_rust",
    "bytemuck",
    "smallvec",
    "cubecl",
];

/// The maximum number of functions that are shown for a place.
const SHOWN: usize = 3;

impl MemoryGrowth {
    /// Returns the growth from the bytes that are allocated after each step, or `None` if the median growth is too
    /// small. The median is used because another thread may free memory during a step.
    pub(super) fn of(after_steps: &[i64], meter: &Meter) -> Option<Self> {
        let notes = if meter.counts_heap() {
            heap::take_notes()
        } else {
            vec![]
        };
        let mut added: Vec<i64> = after_steps
            .windows(2)
            .map(|pair| pair[1] - pair[0])
            .collect();
        added.sort_unstable();
        let median = *added.get(added.len().checked_sub(1)? / 2)?;
        let median = u64::try_from(median).ok()?;
        if median < SMALLEST_GROWTH {
            return None;
        }
        let mut places: BTreeMap<String, u64> = BTreeMap::new();
        for (bytes, backtrace) in notes {
            *places.entry(place(&backtrace)).or_default() += bytes as u64;
        }
        let mut places: Vec<_> = places
            .into_iter()
            .map(|(place, bytes)| (bytes, place))
            .collect();
        places.sort_by(|a, b| b.cmp(a));
        Some(Self {
            bytes_per_step: median,
            places,
        })
    }
}

/// Returns the innermost functions of a backtrace that are not library functions. If all are library
/// functions, returns the innermost functions of Burn.
fn place(backtrace: &str) -> String {
    // Each line is `  12: path::of::function`, followed by `at file` if there is debug information.
    let functions = backtrace.lines().filter_map(|line| {
        let (number, function) = line.trim_start().split_once(": ")?;
        number.parse::<usize>().ok().map(|_| function.trim())
    });
    let functions: Vec<&str> = functions.collect();
    let is_library = |function: &str| {
        let function = function.trim_start_matches(['<', '&']);
        let of = |prefix: &&str| function.starts_with(prefix);
        let is_own = of(&"burn_megatron") && !of(&"burn_megatron_verify::memory_report");
        !is_own && LIBRARIES.iter().any(of)
    };
    let own: Vec<&str> = functions
        .iter()
        .copied()
        .filter(|it| !is_library(it))
        .take(SHOWN)
        .collect();
    if own.is_empty() {
        let of_burn = functions.iter().copied().filter(|it| it.contains("burn_"));
        return of_burn.take(SHOWN).collect::<Vec<_>>().join(" < ");
    }
    own.join(" < ")
}

impl fmt::Display for MemoryGrowth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "GROWS by {} bytes a step (median)", self.bytes_per_step)?;
        for (bytes, place) in self.places.iter().take(8) {
            writeln!(f, "  {bytes} bytes allocated in {place}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn a_place_is_that_of_the_program() {
        let backtrace = "   0: std::backtrace_rs::capture\n   1: <burn_megatron_verify::memory_report::heap::HeapCounter as core::alloc>::alloc\n             at heap.rs:3\n   \
                         2: alloc::vec::Vec<T>::push\n   3: app::cache::Cache::store\n   4: app::loss\n   5: burn_megatron_verify::memory_report::memory_report\n   6: app::main\n";
        assert_eq!(
            place(backtrace),
            "app::cache::Cache::store < app::loss < app::main"
        );
        assert_eq!(
            place("   0: std::x\n   1: burn_flex::ops::matmul\n"),
            "burn_flex::ops::matmul"
        );
    }
}
