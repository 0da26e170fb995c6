//! Records the accesses of a whole launch to global memory.

use std::collections::HashMap;

use super::banks::SECTOR;
use super::{Fault, Options, Program, Warp};
use crate::memory::Snapshot;

/// The records of all blocks.
#[derive(Debug, Default)]
pub(super) struct AccessLog {
    touched: Option<Touched>,
    /// The last writer of each address.
    writers: Option<HashMap<u64, Writer>>,
}

/// The sectors of each allocation that are read, and the sectors that are written.
#[derive(Debug, Default)]
struct Touched(HashMap<usize, [Vec<u64>; 2]>);

#[derive(Clone, Copy, Debug)]
struct Writer {
    block: [u32; 3],
    warp: usize,
    epoch: u32,
    op: usize,
}

impl AccessLog {
    pub fn new(options: &Options) -> Self {
        Self {
            touched: options.touched.then(Touched::default),
            writers: options.checks.conflicts.then(HashMap::new),
        }
    }

    /// Returns whether accessed memory is recorded.
    #[inline]
    pub fn counts(&self) -> bool {
        self.touched.is_some()
    }

    /// Returns whether stores are compared.
    #[inline]
    pub fn compares(&self) -> bool {
        self.writers.is_some()
    }

    /// Records that bytes at an address are read or written.
    pub fn touch(&mut self, memory: &Snapshot, address: u64, bytes: usize, written: bool) {
        let Some((touched, (index, start, end))) = self.touched.as_mut().zip(memory.find(address))
        else {
            return;
        };
        let words = ((end - start) >> SECTOR) as usize / 64 + 1;
        let maps = touched.0.entry(index);
        // Pages of zeros use no memory until they are accessed.
        let maps = maps.or_insert_with(|| [vec![0; words], vec![0; words]]);
        let last = (address + bytes as u64 - 1).min(end - 1);
        for sector in (address - start) >> SECTOR..=(last - start) >> SECTOR {
            maps[usize::from(written)][sector as usize / 64] |= 1 << (sector % 64);
        }
    }

    /// Records a store to an address. `differs` states whether the value differs from the old value.
    pub fn store(
        &mut self,
        program: &Program,
        warp: &Warp,
        (block, epoch): ([u32; 3], u32),
        address: u64,
        differs: bool,
    ) -> Result<(), Fault> {
        let Some(writers) = &mut self.writers else {
            return Ok(());
        };
        let me = Writer {
            block,
            warp: warp.number,
            epoch,
            op: warp.at,
        };
        match writers.insert(address, me) {
            Some(other) if differs && other.unordered(&me) => {
                let op = &program.ops[other.op];
                Err(Fault::Race(format!(
                    "warp {} of block {:?} stored something else to {address:#x}, with nothing \
                     that orders both: {} at line {}",
                    other.warp, other.block, op.text, op.line
                )))
            }
            _ => Ok(()),
        }
    }

    /// Merges the records of another log.
    pub fn merge(&mut self, other: Self) {
        let (Some(mine), Some(others)) = (&mut self.touched, other.touched) else {
            return;
        };
        for (index, maps) in others.0 {
            match mine.0.entry(index) {
                std::collections::hash_map::Entry::Vacant(empty) => {
                    empty.insert(maps);
                }
                std::collections::hash_map::Entry::Occupied(mut full) => {
                    for (to, from) in full.get_mut().iter_mut().zip(&maps) {
                        to.iter_mut().zip(from).for_each(|(to, from)| *to |= from);
                    }
                }
            }
        }
    }

    /// Returns the numbers of different sectors that were read and written.
    pub fn touched(&self) -> (u64, u64) {
        let maps = self.touched.iter().flat_map(|touched| touched.0.values());
        let ones = |map: &[u64]| {
            map.iter()
                .map(|word| u64::from(word.count_ones()))
                .sum::<u64>()
        };
        maps.fold((0, 0), |(read, written), [reads, writes]| {
            (read + ones(reads), written + ones(writes))
        })
    }
}

impl Writer {
    fn unordered(&self, other: &Self) -> bool {
        self.block != other.block || self.warp != other.warp && self.epoch == other.epoch
    }
}
