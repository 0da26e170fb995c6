//! The options of a launch.

/// The options of a launch, and its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The enabled checks.
    pub checks: Checks,
    /// The maximum number of warp instructions of a block. A block that exceeds it counts as endless.
    pub budget: u64,
    /// The number of host threads that run blocks. Programs with atomics on global memory always use one thread,
    /// since their results would depend on the order.
    pub threads: usize,
    /// Whether to count [the accessed sectors](super::Counts::touched_sectors).
    pub touched: bool,
}

/// Errors that a GPU does not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Two warps access the same byte of shared memory without a barrier between them, and one of them writes.
    ///
    /// This check is disabled for programs whose warps may synchronize by other means than a barrier of the whole
    /// block. These means are `mbarrier`, barriers of some of the threads, volatile or ordered loads and stores, and
    /// `atom.cas` and `atom.exch`.
    pub races: bool,
    /// Two lanes of a warp access the same byte without a `.sync` instruction between them, and one of them writes.
    /// The emulator runs lanes in lockstep, which no GPU since Volta guarantees.
    pub lanes: bool,
    /// Shared memory is read before it is written. Disabled by default, since kernels may write a part of a tile and
    /// read the whole tile. Unwritten memory contains NaN, so that its use is visible in the results.
    pub unwritten: bool,
    /// Two blocks, or two warps without a barrier between them, store different values to the same address of global
    /// memory. Only stores of the same width are compared.
    pub conflicts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            checks: Checks::default(),
            // A limit of several minutes.
            budget: 1 << 34,
            threads: 1,
            touched: false,
        }
    }
}

impl Default for Checks {
    fn default() -> Self {
        Self {
            races: true,
            lanes: false,
            unwritten: false,
            conflicts: false,
        }
    }
}
