//! The `nccl` engine on a CUDA device.

use std::sync::Arc;
use std::time::Duration;

use super::library::Library;
use super::stream_order::StreamOrder;
use super::transport::{NcclComponents, NcclTransport};
use crate::error::CommError;
use crate::nccl_config::NcclConfig;
use crate::pool::BufferPool;
use crate::process::KeyValueStore;
use buffer_provider::CudaBufferProvider;
use driver::CudaDeviceDriver;

mod buffer_provider;
mod context;
mod cube;
mod driver;
#[cfg(test)]
mod tests;

/// The options of the `nccl` engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct NcclOptions {
    /// The NCCL settings of a run.
    pub config: NcclConfig,
    /// The order between calls and the computation on the device. If `None`, uses the order in the environment variable
    /// `BURN_MEGATRON_NCCL_ORDER`, or else the best available order.
    pub order: Option<StreamOrder>,
    /// Whether NCCL is also used in a world of one rank. Used in tests.
    pub use_for_one_rank: bool,
}

impl NcclTransport {
    /// Opens the engine for rank `rank` of `size` ranks on the CUDA device with the index `device`. Collective: call on
    /// all ranks.
    ///
    /// Every rank requires its own device, unless NCCL allows several ranks per device (`NCCL_MULTI_RANK_GPU_ENABLE=1`
    /// in newer versions). Rank 0 publishes the unique id of the world in the key-value store. Each rank waits up to
    /// `timeout` for the id and for the other ranks.
    ///
    /// # Errors
    /// [`CommError::Engine`] if no usable NCCL or no such device is found, or after the timeout.
    pub fn open(
        device: usize,
        rank: usize,
        size: usize,
        store: Arc<dyn KeyValueStore>,
        pool: Arc<BufferPool>,
        timeout: Duration,
        options: NcclOptions,
    ) -> Result<Arc<Self>, CommError> {
        let library = Library::open().map_err(|error| super::error(error.to_string()))?;
        let driver = CudaDeviceDriver::new(device).map_err(super::error)?;
        let provider =
            CudaBufferProvider::new(device, &driver, options.order).map_err(super::error)?;
        let parts = NcclComponents {
            library,
            driver,
            provider: Arc::new(provider),
            store,
            pool,
            config: options.config,
            use_for_one_rank: options.use_for_one_rank,
        };
        Self::connect(parts, rank, size, timeout)
    }
}
