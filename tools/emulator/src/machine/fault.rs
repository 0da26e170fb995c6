//! The faults of a kernel.

use std::fmt;

use crate::ptx::Space;

/// A fault of an instruction of a warp.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An access outside of all allocations.
    #[error("lane {lane} accesses {bytes} bytes of {space:?} memory at {address:#x}: {what}")]
    Address {
        /// The lane.
        lane: usize,
        /// The memory space.
        space: Space,
        /// The address.
        address: u64,
        /// The number of bytes.
        bytes: usize,
        /// The reason, with the nearest allocation.
        what: String,
    },
    /// An address that is not a multiple of the access size.
    #[error(
        "lane {lane} accesses {bytes} bytes of {space:?} memory at {address:#x}, which is not aligned to them"
    )]
    Misaligned {
        /// The lane.
        lane: usize,
        /// The memory space.
        space: Space,
        /// The address.
        address: u64,
        /// The number of bytes.
        bytes: usize,
    },
    /// Two warps access the same memory without synchronization, and at least one of them writes.
    #[error("{0}")]
    Race(String),
    /// A read of shared memory that was never written.
    #[error(
        "lane {lane} reads {bytes} bytes of shared memory at {address:#x}, not all written before"
    )]
    Unwritten {
        /// The lane.
        lane: usize,
        /// The address.
        address: u64,
        /// The number of bytes.
        bytes: usize,
    },
    /// Threads wait for threads that never arrive.
    #[error("{0}")]
    Deadlock(String),
    /// A launch exceeds the maximum number of instructions.
    #[error("no end after {0} instructions")]
    Endless(u64),
    /// Behaviour that is undefined in the specification.
    #[error("undefined: {0}")]
    Undefined(String),
}

/// The location of an instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultLocation {
    /// The name of the kernel.
    pub kernel: String,
    /// The line of the PTX text.
    pub line: usize,
    /// The instruction.
    pub instruction: String,
    /// The position of the block in the grid.
    pub block: [u32; 3],
    /// The number of the warp in the block.
    pub warp: usize,
}

/// A fault and its location.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct Failure {
    /// The fault.
    pub fault: Fault,
    /// The location.
    pub place: FaultLocation,
}

impl fmt::Display for FaultLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kernel,
            line,
            instruction,
            block: [x, y, z],
            warp,
        } = self;
        write!(
            f,
            "{kernel}, block ({x}, {y}, {z}), warp {warp}, {instruction} at line {line}"
        )
    }
}
