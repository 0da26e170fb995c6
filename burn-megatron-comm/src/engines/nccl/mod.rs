//! The engine `nccl`: ranks with a GPU each, over NVIDIA's collective communication library.
//!
//! A rank has one [`NcclWorker`](worker::NcclWorker), the thread that launches its calls; communicators are
//! [created](opening) on others, at the first call of a group. Host buffers are copied to the device and back; tensors stay where they are, through a
//! [`DeviceBufferProvider`](buffer_provider::DeviceBufferProvider). Only the consumers of a result wait for the
//! device.
//!
//! Differences from the engine of threads:
//!
//! - The order of reductions is NCCL's own and depends on its algorithm, the number of ranks and the size, so
//!   results agree with other engines within rounding only. `bf16` and `f16` are rounded at every addition,
//!   not once at the end.
//! - A NaN does not always win a maximum or a minimum.
//! - Mismatching calls are not detected: the ranks wait, or get wrong values, until the deadline.
//! - Collectives over groups that share ranks must be started in one order on all of them.
//! - A rank's messages to itself do not come here: the communicator keeps them.

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

// Used by `World::from_env` and by the command that shows the environment.
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
