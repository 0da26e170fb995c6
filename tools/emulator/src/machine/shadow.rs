//! The history of each byte of shared memory: who touched it last, and whether anything was ever written there.

use super::access::Access;
use super::{Checks, Fault, Program, Warp};

/// The memory of a block, in cells of equal size: as large as all accesses allow so far.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    checks: Checks,
    /// Bytes of a cell, as a power of two.
    shift: u32,
    cells: Vec<Cell>,
    /// One cell of lanes for each of `cells`, where lanes of a warp are checked.
    lanes: Vec<LaneCell>,
    /// Rounds between barriers, counted from 1 over all blocks.
    epoch: u32,
    /// The epoch in which this block began.
    first: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// When it was last written and read.
    written: u32,
    read: u32,
    /// By which instruction.
    write_op: u32,
    read_op: u32,
    /// By which warp.
    writer: u16,
    reader: u16,
    /// The write was atomic.
    atomic: bool,
}

/// More than one warp, or lane.
const MANY: u16 = u16::MAX;

/// The last write and read by a lane, and how often its warp had met before.
#[derive(Clone, Copy, Debug, Default)]
struct LaneCell {
    writer: u16,
    reader: u16,
    write_meeting: u32,
    read_meeting: u32,
}

/// Who touches memory.
#[derive(Clone, Copy)]
pub(super) struct Accessor {
    pub warp: usize,
    pub lane: usize,
    pub op: usize,
    /// The number of times that lanes of the warp have waited for each other.
    pub reconvergences: u32,
}

impl Accessor {
    pub fn new(warp: &Warp, lane: usize) -> Self {
        Self {
            warp: warp.number,
            lane,
            op: warp.at,
            reconvergences: warp.reconvergences,
        }
    }
}

impl Shadow {
    pub fn new(checks: Checks, program: &Program) -> Self {
        let races = checks.races && !synchronises_itself(program);
        Self {
            checks: Checks {
                races,
                lanes: checks.lanes && races,
                ..checks
            },
            shift: 4,
            ..Self::default()
        }
    }

    /// Whether anything is watched.
    #[inline]
    pub fn watches(&self) -> bool {
        self.checks.races || self.checks.unwritten
    }

    /// A block with so many bytes begins.
    pub fn begin(&mut self, bytes: usize) {
        if !self.watches() {
            return;
        }
        self.epoch += 1;
        self.first = self.epoch;
        let cells = bytes.div_ceil(1 << self.shift);
        self.cells.resize(cells, Cell::default());
        if self.checks.lanes {
            self.lanes.resize(cells, LaneCell::default());
        }
    }

    /// All threads have passed a barrier.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// Warps wait for each other in ways that are not followed here.
    pub fn lose_track(&mut self) {
        self.checks.races = false;
        self.checks.lanes = false;
    }

    /// An access, which lies inside of the memory.
    #[inline]
    pub fn touch(
        &mut self,
        access: Access,
        by: Accessor,
        address: u64,
        bytes: usize,
        program: &Program,
    ) -> Result<(), Fault> {
        if bytes >> self.shift == 0 {
            self.refine(bytes.trailing_zeros());
        }
        let first = address as usize >> self.shift;
        for index in first..first + (bytes >> self.shift) {
            let (cell, epoch) = (&mut self.cells[index], self.epoch);
            let reads = access != Access::Write;
            if reads && self.checks.unwritten && cell.written < self.first {
                return Err(Fault::Unwritten {
                    lane: by.lane,
                    address,
                    bytes,
                });
            }
            if self.checks.races
                && let Some((op, did)) = cell.race(access, by.warp as u16, epoch)
            {
                return Err(race(program, address, op, did, "warp, with no barrier"));
            }
            if self.checks.lanes {
                let lanes = &mut self.lanes[index];
                if let Some((op, did)) = cell.race_of_lanes(lanes, access, by, epoch) {
                    let other = "lane, with no .sync instruction";
                    return Err(race(program, address, op, did, other));
                }
                lanes.touch(access, by, cell, epoch);
            }
            cell.touch(access, by, epoch);
        }
        Ok(())
    }

    /// Makes cells smaller; each part knows what the whole knew.
    fn refine(&mut self, shift: u32) {
        let parts = 1 << (self.shift - shift);
        let each = |cell: &Cell| std::iter::repeat_n(*cell, parts);
        self.cells = self.cells.iter().flat_map(each).collect();
        let each = |cell: &LaneCell| std::iter::repeat_n(*cell, parts);
        self.lanes = self.lanes.iter().flat_map(each).collect();
        self.shift = shift;
    }
}

impl Cell {
    /// The instruction that an access is in a race with, and what it did.
    #[inline]
    fn race(&self, access: Access, warp: u16, epoch: u32) -> Option<(u32, &'static str)> {
        let both_atomic = access == Access::Atomic && self.atomic;
        if self.written == epoch && self.writer != warp && !both_atomic {
            return Some((self.write_op, "writes"));
        }
        let other_read = self.read == epoch && self.reader != warp;
        (access != Access::Read && other_read).then_some((self.read_op, "reads"))
    }

    #[inline]
    fn touch(&mut self, access: Access, by: Accessor, epoch: u32) {
        let warp = by.warp as u16;
        match access {
            Access::Read => {
                let others = self.read == epoch && self.reader != warp;
                self.reader = if others { MANY } else { warp };
                self.read = epoch;
                self.read_op = by.op as u32;
            }
            _ => {
                let others = self.written == epoch && self.writer != warp;
                self.writer = if others { MANY } else { warp };
                self.written = epoch;
                self.write_op = by.op as u32;
                self.atomic = access == Access::Atomic;
            }
        }
    }

    fn race_of_lanes(
        &self,
        lanes: &LaneCell,
        access: Access,
        by: Accessor,
        epoch: u32,
    ) -> Option<(u32, &'static str)> {
        let (warp, lane, op) = (by.warp as u16, by.lane as u16, by.op as u32);
        let both_atomic = access == Access::Atomic && self.atomic;
        // What one instruction does at once is not looked at: which lane wins does not matter to
        // those who write so.
        let written = self.written == epoch && self.writer == warp && self.write_op != op;
        if written
            && !both_atomic
            && lanes.write_meeting == by.reconvergences
            && lanes.writer != lane
        {
            return Some((self.write_op, "writes"));
        }
        let read = self.read == epoch && self.reader == warp && self.read_op != op;
        let others = read && lanes.read_meeting == by.reconvergences && lanes.reader != lane;
        (access != Access::Read && others).then_some((self.read_op, "reads"))
    }
}

impl LaneCell {
    /// Before the cell itself learns of it.
    fn touch(&mut self, access: Access, by: Accessor, cell: &Cell, epoch: u32) {
        let (warp, lane) = (by.warp as u16, by.lane as u16);
        let one = |before: bool, other: u16| if before && other != lane { MANY } else { lane };
        match access {
            Access::Read => {
                let before = cell.read == epoch && cell.reader == warp;
                self.reader = one(
                    before && self.read_meeting == by.reconvergences,
                    self.reader,
                );
                self.read_meeting = by.reconvergences;
            }
            _ => {
                let before = cell.written == epoch && cell.writer == warp;
                self.writer = one(
                    before && self.write_meeting == by.reconvergences,
                    self.writer,
                );
                self.write_meeting = by.reconvergences;
            }
        }
    }
}

fn race(program: &Program, address: u64, op: u32, did: &str, who: &str) -> Fault {
    let other = &program.ops[op as usize];
    Fault::Race(format!(
        "byte {address} of shared memory is touched here, and {} at line {} {did} it in another \
         {who} between",
        other.text, other.line
    ))
}

/// Whether warps may wait for each other in other ways than at barriers of the whole block.
fn synchronises_itself(program: &Program) -> bool {
    let orders = [
        "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio",
    ];
    program.ops.iter().any(|op| {
        let mut words = op.text.split('.');
        let name = words.next().unwrap_or_default();
        let has = |wanted: &[&str]| op.text.split('.').any(|word| wanted.contains(&word));
        match name {
            "mbarrier" => true,
            "cp" => has(&["bulk", "mbarrier"]),
            "ld" | "st" | "red" => has(&orders),
            "atom" => has(&orders) || has(&["cas", "exch"]) && !has(&["global"]),
            _ => false,
        }
    })
}
