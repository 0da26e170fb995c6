//! Finds paths through a kernel, or through one iteration of a loop.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::code::{Instruction, MachineCode};
use crate::sass::Direction;

/// The minimum number of bits of an access that counts as streaming.
const WIDE: u32 = 64;

/// A contiguous range of instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// The index of the first instruction.
    pub first: usize,
    /// The index of the last instruction.
    pub last: usize,
    /// Whether a jump leads from the end to the beginning.
    pub is_loop: bool,
}

impl Region {
    fn holds(&self, other: &Region) -> bool {
        self != other && self.first <= other.first && other.last <= self.last
    }
}

/// Returns the innermost loops that stream memory.
///
/// Remainder loops of an unrolled loop are omitted. A loop is a remainder loop if its loads and stores are a fraction
/// of the loads and stores of another loop.
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
    // A backward jump that its target cannot reach comes from code for rare cases behind the end of the kernel.
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

/// Returns the number of streaming loads and of streaming stores in a region.
fn wide(code: &MachineCode, region: &Region) -> (usize, usize) {
    let instructions = &code.instructions[region.first..=region.last];
    let accesses = instructions.iter().filter_map(|i| i.access.as_ref());
    let wide: Vec<_> = accesses.filter(|a| a.bits >= WIDE).collect();
    let loads = wide.iter().filter(|a| a.direction == Direction::Load);
    let loads = loads.count();
    (loads, wide.len() - loads)
}

/// Returns the path through a region that streams the most bits. Ties are broken by the number of exponentials
/// (largest first), and then by the cost (lowest first). Returns `None` if no such path reaches the end.
///
/// Narrow accesses do not count as streaming, since they may lie on a path that few rows take. Without counting
/// exponentials, the path of masked rows could be chosen. Only forward jumps are taken: an inner loop is executed
/// once, or skipped. Compilers place rare cases behind the end of the kernel, from where they jump back. This code is
/// omitted.
pub fn main_path(
    code: &MachineCode,
    region: Region,
    cost: impl Fn(&Instruction) -> u64,
) -> Option<Vec<usize>> {
    let count = region.last + 1 - region.first;
    // For each instruction: the score before it, and the previous instruction on the path.
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

/// The score of a path. The streamed bits are compared first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct PathScore {
    streamed: u32,
    exponentials: u64,
    spent: Reverse<u64>,
}

/// Returns the instructions that may follow an instruction.
fn successors(instruction: &Instruction, at: usize) -> impl Iterator<Item = usize> {
    let leaves = matches!(instruction.kind(), "BRA" | "EXIT" | "RET" | "BRX" | "JMP");
    let falls = !leaves || instruction.conditional;
    let jump = instruction.target.into_iter();
    jump.chain(falls.then_some(at + 1))
}
