//! The `nccl` engine, which uses NVIDIA's collective communication library. Each rank has one GPU.
//!
//! Each rank has one [`NcclWorker`](worker::NcclWorker), a thread that launches the calls of the rank. Other threads
//! [create](opening) the communicator of a group at its first call. Host buffers are copied to the device, and results
//! are copied back. Tensors are not copied: the engine accesses their memory through a
//! [`DeviceBufferProvider`](buffer_provider::DeviceBufferProvider). Only the consumers of a result wait for the device.
//!
//! Differences from the `threads` engine:
//!
//! - NCCL chooses the order of the additions in a reduction. The order depends on the algorithm, the number of ranks
//!   and the size. Therefore, results are equal to the results of other engines only within rounding errors. `bf16` and
//!   `f16` values are rounded at every addition instead of once at the end.
//! - The result of a maximum or a minimum may not be NaN although one of the inputs is NaN.
//! - Mismatched calls are not detected. The ranks wait until the timeout, or get wrong values.
//! - If groups share several ranks, their collectives must be started in the same order on all these ranks.
//! - Messages of a rank to itself are not passed to this engine. The communicator delivers them.

use crate::error::CommError;

mod api;
mod buffer_provider;
mod buffers;
mod call;
mod collective_streams;
mod communicator;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod engine_state;
mod library;
mod opening;
mod plan;
mod registered;
mod stream_order;
#[cfg(test)]
mod tests;
mod transport;
mod types;
mod version;
mod worker;

// Used by `World::from_env` and by the command that reports the environment.
#[cfg(feature = "cuda")]
#[allow(unused_imports)]
pub(crate) use cuda::NcclOptions;
#[allow(unused_imports)]
pub(crate) use library::{Library, LibraryError};
#[allow(unused_imports)]
pub(crate) use transport::NcclTransport;

/// The name of the engine.
const ENGINE: &str = "nccl";

fn error(message: String) -> CommError {
    CommError::engine(ENGINE, message)
}
