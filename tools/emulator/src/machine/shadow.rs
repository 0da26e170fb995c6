//! Tracks each byte of shared memory: the last accesses, and whether the byte was ever written.

use super::access::Access;
use super::{Checks, Fault, Program, Warp};

/// The shared memory of a block in cells of equal size. Cells are as large as all accesses so far allow.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    checks: Checks,
    /// The size of a cell in bytes, as a power of two.
    shift: u32,
    cells: Vec<Cell>,
    /// One lane cell for each of `cells`, if the lanes of a warp are checked.
    lanes: Vec<LaneCell>,
    /// The number of barrier rounds, counted from 1 over all blocks.
    epoch: u32,
    /// The epoch in which this block began.
    first: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// The epochs of the last write and the last read.
    written: u32,
    read: u32,
    /// The instructions of the last write and the last read.
    write_op: u32,
    read_op: u32,
    /// The warps of the last write and the last read.
    writer: u16,
    reader: u16,
    /// Whether the last write was atomic.
    atomic: bool,
}

/// More than one warp, or more than one lane.
const MANY: u16 = u16::MAX;

/// The lanes of the last write and the last read, and the number of reconvergences of the warp before them.
#[derive(Clone, Copy, Debug, Default)]
struct LaneCell {
    writer: u16,
    reader: u16,
    write_meeting: u32,
    read_meeting: u32,
}

/// The origin of an access.
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

    /// Returns whether any check is enabled.
    #[inline]
    pub fn watches(&self) -> bool {
        self.checks.races || self.checks.unwritten
    }

    /// Begins a block with this number of bytes.
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

    /// Records that all threads have passed a barrier.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// Disables the checks for races, since warps synchronize in ways that are not tracked.
    pub fn lose_track(&mut self) {
        self.checks.races = false;
        self.checks.lanes = false;
    }

    /// Checks and records an access. The access must lie inside the memory.
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

    /// Splits cells into smaller cells with the same history.
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
    /// Returns the instruction that an access races with, and whether it reads or writes.
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
        // Accesses of lanes in the same instruction are not checked: such code does not depend on which lane wins.
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
    /// Records an access. It must be called before the cell itself is updated.
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

/// Returns whether warps may synchronize by other means than barriers of the whole block.
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
