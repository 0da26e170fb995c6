//! Paths through a kernel, or through one iteration of a loop.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::code::{Instruction, MachineCode};
use crate::sass::Direction;

/// Bits of an access that streams.
const WIDE: u32 = 64;

/// A contiguous range of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The first.
    pub first: usize,
    /// The last.
    pub last: usize,
    /// Whether a jump leads from its end to its beginning.
    pub is_loop: bool,
}

impl Region {
    fn holds(&self, other: &Region) -> bool {
        self != other && self.first <= other.first && other.last <= self.last
    }
}

/// The innermost loops that stream memory.
///
/// Remainder loops of an unrolled loop are omitted: loops whose accesses are a fraction of those of
/// another.
pub fn streaming_loops(code: &MachineCode) -> Vec<Region> {
    let mut ends = BTreeMap::new();
    for (at, instruction) in code.instructions.iter().enumerate() {
        if let Some(first) = instruction.target.filter(|first| *first <= at) {
            ends.insert(first, at);
        }
    }
    let loops = ends.into_iter().map(|(first, last)| Region {
        first,
        last,
        is_loop: true,
    });
    // A backward jump that cannot be reached from its target comes from a rare case after the end.
    let streaming: Vec<_> = loops
        .filter(|region| wide(code, region) != (0, 0) && main_path(code, *region, |_| 0).is_some())
        .collect();
    let innermost: Vec<_> = streaming
        .iter()
        .filter(|region| !streaming.iter().any(|other| region.holds(other)))
        .copied()
        .collect();
    let is_rest = |region: &&Region| {
        let mut others = innermost.iter();
        let (loads, stores) = wide(code, region);
        others.any(|other| {
            let (more_loads, more_stores) = wide(code, other);
            more_loads + more_stores > loads + stores && more_loads * stores == more_stores * loads
        })
    };
    let whole = innermost.iter().filter(|region| !is_rest(region));
    whole.copied().collect()
}

/// Loads and stores of a region that stream.
fn wide(code: &MachineCode, region: &Region) -> (usize, usize) {
    let instructions = &code.instructions[region.first..=region.last];
    let accesses = instructions.iter().filter_map(|i| i.access.as_ref());
    let wide: Vec<_> = accesses.filter(|a| a.bits >= WIDE).collect();
    let loads = wide.iter().filter(|a| a.direction == Direction::Load);
    let loads = loads.count();
    (loads, wide.len() - loads)
}

/// The path through a region that streams most; of several, the one with the most exponentials,
/// then the cheapest.
///
/// Narrow accesses do not count as streaming: they may be on a path that few rows take. Without
/// counting exponentials it could be the path of masked rows. Only forward jumps are taken: an
/// inner loop is walked through once, or skipped. Code after the end of the kernel that jumps back,
/// where compilers put rare cases, is omitted. `None` if the end cannot be reached this way.
pub fn main_path(
    code: &MachineCode,
    region: Region,
    cost: impl Fn(&Instruction) -> u64,
) -> Option<Vec<usize>> {
    let count = region.last + 1 - region.first;
    // For each instruction: the score before it, and its predecessor.
    let mut best: Vec<Option<(PathScore, usize)>> = vec![None; count];
    best.first_mut()?.replace((PathScore::default(), 0));
    let mut end: Option<(PathScore, usize)> = None;
    for at in region.first..=region.last {
        let Some((before, _)) = best[at - region.first] else {
            continue;
        };
        let instruction = &code.instructions[at];
        let wide = instruction.access.as_ref().filter(|a| a.bits >= WIDE);
        let value = PathScore {
            streamed: before.streamed + wide.map_or(0, |a| a.bits),
            exponentials: before.exponentials + u64::from(instruction.name == "MUFU.EX2"),
            spent: Reverse(before.spent.0 + cost(instruction)),
        };
        let ends = if region.is_loop {
            instruction.target == Some(region.first)
        } else {
            instruction.kind() == "EXIT"
        };
        if ends && end.is_none_or(|(other, _)| value > other) {
            end = Some((value, at));
        }
        for next in successors(instruction, at) {
            if next > at && next <= region.last {
                let slot = &mut best[next - region.first];
                if slot.is_none_or(|(other, _)| value > other) {
                    *slot = Some((value, at));
                }
            }
        }
    }
    let (_, mut at) = end?;
    let mut path = vec![at];
    while at != region.first {
        (_, at) = best[at - region.first]?;
        path.push(at);
    }
    path.reverse();
    Some(path)
}

/// The score of a path, compared first by what it streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct PathScore {
    streamed: u32,
    exponentials: u64,
    spent: Reverse<u64>,
}

/// Where control may go after an instruction.
fn successors(instruction: &Instruction, at: usize) -> impl Iterator<Item = usize> {
    let leaves = matches!(instruction.kind(), "BRA" | "EXIT" | "RET" | "BRX" | "JMP");
    let falls = !leaves || instruction.conditional;
    let jump = instruction.target.into_iter();
    jump.chain(falls.then_some(at + 1))
}
