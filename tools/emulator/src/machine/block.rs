//! A block: its position, its shared memory, and its state at barriers.

use super::asynchronous::Asynchronous;
use super::barrier::{BarrierResult, Barriers};
use super::ledger::AccessLog;
use super::shadow::Shadow;
use super::{Counts, Launch};

/// A running block.
pub struct Block<'a> {
    /// The launch of the block.
    pub launch: &'a Launch<'a>,
    /// The position in the grid, `%ctaid`.
    pub position: [u32; 3],
    /// The shared memory.
    pub shared: Shared,
    /// The counts of the block's work.
    pub counts: Counts,
    pub(super) barriers: Barriers,
    pub(super) work: &'a mut BlockScratch,
    /// Pending asynchronous copies.
    pub asynchronous: Asynchronous,
}

/// The shared memory of a block.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The number of barriers that the block has passed.
    pub epoch: u32,
}

/// The state that is reused from block to block.
pub(super) struct BlockScratch {
    pub shadow: Shadow,
    pub ledger: AccessLog,
    /// The allocation that each instruction accessed last, indexed by the lower bits of the instruction's number.
    pub ranges: [(u64, u64); 16],
}

impl BlockScratch {
    pub fn new(launch: &Launch<'_>) -> Self {
        let options = &launch.options;
        Self {
            shadow: Shadow::new(options.checks, launch.program),
            ledger: AccessLog::new(options),
            ranges: [(0, 0); 16],
        }
    }
}

impl<'a> Block<'a> {
    pub(super) fn new(
        launch: &'a Launch<'a>,
        position: [u32; 3],
        work: &'a mut BlockScratch,
    ) -> Self {
        let bytes = launch.program.shared + launch.dynamic_shared;
        work.shadow.begin(bytes);
        Self {
            launch,
            position,
            shared: Shared {
                // Memory that is read before it is written contains NaN.
                bytes: vec![0xff; bytes],
                epoch: 0,
            },
            counts: Counts::default(),
            barriers: Barriers::new(launch.threads()),
            work,
            asynchronous: Asynchronous::default(),
        }
    }

    /// Updates the state after threads have arrived at a barrier.
    pub(super) fn passed(&mut self, passed: BarrierResult) {
        match passed {
            BarrierResult::No => {}
            BarrierResult::All => {
                self.shared.epoch += 1;
                self.work.shadow.barrier();
            }
            BarrierResult::Some => self.work.shadow.lose_track(),
        }
    }
}
