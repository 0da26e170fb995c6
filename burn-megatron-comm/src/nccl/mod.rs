//! The engine `nccl`: ranks with a GPU each, over NVIDIA's collective communication library.
//!
//! A rank has one [`Worker`](worker::Worker), the only thread that calls NCCL. Buffers of the host are copied to the
//! device and back; tensors stay where they are, lent by a [`Lender`](lender::Lender). Nothing waits for the device but what
//! needs its result.
//!
//! What differs from the engine of threads:
//!
//! - The order of sums is NCCL's own and depends on its algorithm, the number of ranks and the size, so
//!   results agree with other engines within rounding only. `bf16` and `f16` are rounded at every step of
//!   the way, not once at the end.
//! - A NaN does not always win a maximum or a minimum.
//! - Calls that disagree are not found: the ranks wait, or get wrong values, until the deadline.
//! - Collectives over groups that share ranks must be started in one order on all of them.
//! - A rank's messages to itself stay on the host.

use super::error::CommError;

mod api;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod item;
mod lane;
mod lender;
mod library;
mod memory;
mod opening;
mod order;
mod own_mail;
mod plan;
mod registered;
mod shared;
#[cfg(test)]
mod tests;
mod transport;
mod types;
mod version;
mod worker;

// Their users are `World::from_env` and the command that shows what is there.
#[cfg(feature = "cuda")]
#[allow(unused_imports)]
pub(super) use cuda::NcclOptions;
#[allow(unused_imports)]
pub(super) use library::{Library, LibraryError};
#[allow(unused_imports)]
pub(super) use transport::NcclTransport;

/// The name of the engine.
const ENGINE: &str = "nccl";

fn error(message: String) -> CommError {
    CommError::Engine {
        engine: ENGINE.into(),
        message,
    }
}
