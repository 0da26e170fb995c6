//! NCCL for the emulated device: programs open this library as `libnccl.so.2` too.
//!
//! Ranks are threads of one process, any number of them on the one device, as the real library allows
//! with `NCCL_MULTI_RANK_GPU_ENABLE=1`. The calls of a group that go to one communicator stand on
//! their stream until each has met its counterparts, and then move data at once; sums are made in the
//! order of the ranks and rounded after each addition.
//!
//! Calls that do not fit together (one rank gives another count, type, reduction or root, or calls
//! something else), which make the real library hang or give anything, are report in a line on the
//! standard error and by `ncclCommGetAsyncError` on all ranks; their streams go on. So is a deadlock:
//! collectives occupy multiprocessors, as if each rank had a device of its own, and one for which there are not enough
//! waits until others end.

mod api;
mod calls;
mod group;
mod memory;
mod operation;
mod residency;
mod state;
#[cfg(test)]
mod tests;
mod value;

/// `ncclResult_t`: a plain number, as callers may know more or fewer of them.
type Code = i32;

const SUCCESS: Code = 0;
const UNHANDLED_CUDA_ERROR: Code = 1;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const REMOTE_ERROR: Code = 6;
const IN_PROGRESS: Code = 7;

/// As `ncclGetVersion` gives it: 2.27.3, the first with windows.
const VERSION: i32 = 22_703;

/// Why a call fails.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    code: Code,
    reason: String,
}

/// An argument that is wrong whatever the other ranks do.
fn argument(reason: impl Into<String>) -> Failure {
    let (code, reason) = (INVALID_ARGUMENT, reason.into());
    Failure { code, reason }
}

/// A call that does not belong here.
fn usage(reason: impl Into<String>) -> Failure {
    let (code, reason) = (INVALID_USAGE, reason.into());
    Failure { code, reason }
}
