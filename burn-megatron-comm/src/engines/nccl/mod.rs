//! The engine `nccl` for ranks with one GPU each. It uses NVIDIA's collective communication library.
//!
//! Each rank has one [`NcclWorker`](worker::NcclWorker), the thread that launches its calls. Other threads
//! [create](opening) communicators at the first call of a group. Host buffers are copied to the device and back.
//! Tensors stay in place and are accessed through a [`DeviceBufferProvider`](buffer_provider::DeviceBufferProvider).
//! Only the consumers of a result wait for the device.
//!
//! Differences from the thread engine:
//!
//! - NCCL chooses the order of a reduction, which depends on its algorithm, the number of ranks and the size. The
//!   results match other engines only within rounding. `bf16` and `f16` are rounded at every addition instead of once
//!   at the end.
//! - A NaN does not always win a maximum or a minimum.
//! - Mismatched calls are not detected. The ranks wait until the deadline, or get wrong values.
//! - Collectives over groups that share ranks must be started in the same order on all these ranks.
//! - Messages of a rank to itself do not reach this engine. The communicator delivers them.

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
