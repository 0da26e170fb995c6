//! The faults of a kernel.

use std::fmt;

use crate::ptx::Space;

/// The fault of one instruction of one warp.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An address outside of all that is allocated.
    #[error("lane {lane} accesses {bytes} bytes of {space:?} memory at {address:#x}: {what}")]
    Address {
        /// The lane.
        lane: usize,
        /// The kind of memory.
        space: Space,
        /// The address.
        address: u64,
        /// The number of bytes.
        bytes: usize,
        /// Why it may not, with what lies nearest.
        what: String,
    },
    /// An address that is no multiple of what is accessed there.
    #[error(
        "lane {lane} accesses {bytes} bytes of {space:?} memory at {address:#x}, which is not aligned to them"
    )]
    Misaligned {
        /// The lane.
        lane: usize,
        /// The kind of memory.
        space: Space,
        /// The address.
        address: u64,
        /// The number of bytes.
        bytes: usize,
    },
    /// Two warps touch the same memory with nothing between that orders them, and one writes.
    #[error("{0}")]
    Race(String),
    /// Shared memory is read that nothing has written.
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
    /// Threads that wait for threads that never come.
    #[error("{0}")]
    Deadlock(String),
    /// More instructions than a launch may run.
    #[error("no end after {0} instructions")]
    Endless(u64),
    /// Behaviour that the specification leaves undefined.
    #[error("undefined: {0}")]
    Undefined(String),
}

/// Where an instruction ran.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultLocation {
    /// The kernel.
    pub kernel: String,
    /// The line of its PTX.
    pub line: usize,
    /// The instruction.
    pub instruction: String,
    /// The position of the block in the grid.
    pub block: [u32; 3],
    /// The number of the warp in the block.
    pub warp: usize,
}

/// A fault and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}: {fault}")]
pub struct Failure {
    /// The fault.
    pub fault: Fault,
    /// Where.
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
