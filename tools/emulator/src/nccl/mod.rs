//! NCCL for the emulated device. Programs open this library as `libnccl.so.2`.
//!
//! Ranks are threads of one process. Any number of ranks share the one device, as the real library allows with
//! `NCCL_MULTI_RANK_GPU_ENABLE=1`. The calls of a group on one communicator wait on their stream until each call has
//! met its counterparts. The data then move at once. Sums are computed in the order of the ranks and rounded after
//! each addition.
//!
//! Calls do not match if ranks pass different counts, types, reductions or roots, or make different calls. The real
//! library hangs or returns arbitrary results in this case. The emulator prints a line to standard error and reports
//! the error through `ncclCommGetAsyncError` on all ranks. Their streams continue.
//!
//! Deadlocks are reported in the same way. Collectives occupy multiprocessors, as if each rank had its own device. A
//! collective without enough free multiprocessors waits until other collectives end.

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

/// `ncclResult_t`, as a plain number, since callers may use values that this library does not define.
type Code = i32;

const SUCCESS: Code = 0;
const UNHANDLED_CUDA_ERROR: Code = 1;
const INVALID_ARGUMENT: Code = 4;
const INVALID_USAGE: Code = 5;
const REMOTE_ERROR: Code = 6;
const IN_PROGRESS: Code = 7;

/// The result of `ncclGetVersion`: 2.27.3, the first version with windows.
const VERSION: i32 = 22_703;

/// The reason why a call fails.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    code: Code,
    reason: String,
}

/// Returns the failure of an argument that is wrong independent of the other ranks.
fn argument(reason: impl Into<String>) -> Failure {
    let (code, reason) = (INVALID_ARGUMENT, reason.into());
    Failure { code, reason }
}

/// Returns the failure of a call that is not allowed in this state.
fn usage(reason: impl Into<String>) -> Failure {
    let (code, reason) = (INVALID_USAGE, reason.into());
    Failure { code, reason }
}
