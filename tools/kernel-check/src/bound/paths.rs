//! Ways through a kernel, or once around a loop of it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::code::{Code, Instruction};
use crate::sass::Direction;

/// Bits of an access that streams.
const WIDE: u32 = 64;

/// Neighbouring instructions of a listing.
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

/// The loops that stream memory and hold no other that does.
///
/// Left out is what an unrolled loop leaves to do: a loop with the accesses of which another has a
/// multiple.
pub fn streaming_loops(code: &Code) -> Vec<Region> {
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
    // A jump back that cannot be reached from where it leads comes from a rare case behind the end.
    let streaming: Vec<_> = loops
        .filter(|region| wide(code, region) != (0, 0) && fullest(code, *region, |_| 0).is_some())
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
fn wide(code: &Code, region: &Region) -> (usize, usize) {
    let instructions = &code.instructions[region.first..=region.last];
    let accesses = instructions.iter().filter_map(|i| i.access.as_ref());
    let wide: Vec<_> = accesses.filter(|a| a.bits >= WIDE).collect();
    let loads = wide.iter().filter(|a| a.direction == Direction::Load);
    let loads = loads.count();
    (loads, wide.len() - loads)
}

/// The way through a region that streams most, of those one with the most exponentials, and of those
/// the one that costs least.
///
/// Narrow accesses do not make a way the fuller one: they may be a detour that few rows take. Without
/// the exponentials it could be that of rows that are masked.
/// Only jumps ahead are taken: a loop inside is walked through once, or passed. What lies behind the
/// end of the kernel and jumps back, where compilers put rare cases, is left out. `None` if the end cannot be
/// reached so.
pub fn fullest(
    code: &Code,
    region: Region,
    cost: impl Fn(&Instruction) -> u64,
) -> Option<Vec<usize>> {
    let count = region.last + 1 - region.first;
    // For each instruction: what was done before it, and from where it was reached.
    let mut best: Vec<Option<(Done, usize)>> = vec![None; count];
    best.first_mut()?.replace((Done::default(), 0));
    let mut end: Option<(Done, usize)> = None;
    for at in region.first..=region.last {
        let Some((before, _)) = best[at - region.first] else {
            continue;
        };
        let instruction = &code.instructions[at];
        let wide = instruction.access.as_ref().filter(|a| a.bits >= WIDE);
        let value = Done {
            streamed: before.streamed + wide.map_or(0, |a| a.bits),
            exponentials: before.exponentials + u64::from(instruction.name == "MUFU.EX2"),
            spent: Reverse(before.spent.0 + cost(instruction)),
        };
        let ends = match region.is_loop {
            true => instruction.target == Some(region.first),
            false => instruction.kind() == "EXIT",
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

/// What a way does. The greater is the fuller: first by what it streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Done {
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
