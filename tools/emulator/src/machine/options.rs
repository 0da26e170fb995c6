//! The options of a launch in addition to running.

/// The options of a launch, and the faults that it looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The checks.
    pub checks: Checks,
    /// Instructions of warps that a block may run before it counts as endless.
    pub budget: u64,
    /// Threads of the host that run blocks. One is enough for programs with atomics on global
    /// memory: their results would depend on the order.
    pub threads: usize,
    /// Whether to count [the memory that is touched](super::Counts::touched_sectors).
    pub touched: bool,
}

/// Errors that a GPU does not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checks {
    /// Two warps touch the same byte of shared memory with no barrier between, and one writes.
    ///
    /// Not looked for in programs whose warps may wait for each other in another way than at a
    /// barrier of the whole block: by `mbarrier`, by barriers of some of the threads, by loads and
    /// stores that are volatile or name an order, by `atom.cas` and `atom.exch`.
    pub races: bool,
    /// Two lanes of a warp do so with no `.sync` instruction between. They run in step here, which
    /// no GPU since Volta promises.
    pub lanes: bool,
    /// Shared memory is read that nothing has written. Off unless asked for: tiles are read whole
    /// though only a part was written, and what was not is no number, so that its use shows.
    pub unwritten: bool,
    /// Two blocks, or two warps with no barrier between, store different values to one address of
    /// global memory. Only stores of the same width are compared.
    pub conflicts: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            checks: Checks::default(),
            // Minutes.
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
