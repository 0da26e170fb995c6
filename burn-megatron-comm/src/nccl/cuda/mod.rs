//! The engine on a CUDA device.

use std::sync::Arc;
use std::time::Duration;

use super::library::Library;
use super::order::Order;
use super::transport::{NcclTransport, Parts};
use crate::error::CommError;
use crate::pool::BufferPool;
use crate::process::Bulletin;
use driver::CudaDriver;
use lender::CudaLender;

mod context;
mod cube;
mod driver;
mod lender;
#[cfg(test)]
mod tests;

/// What the engine is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NcclOptions {
    /// Registered memory for the collectives of large tensors, where NCCL has it.
    pub registered: bool,
    /// How calls are put in order with what the device computes; else as the variable
    /// `BURN_MEGATRON_NCCL_ORDER` says, else the best that is there.
    pub order: Option<Order>,
    /// A world of one rank goes through NCCL as well, for tests.
    pub alone_too: bool,
}

impl NcclTransport {
    /// The engine for the rank `rank` of `size` on the CUDA device `device`, when all ranks have come.
    ///
    /// Every rank needs a device of its own, unless NCCL is told otherwise (`NCCL_MULTI_RANK_GPU_ENABLE=1`
    /// of newer versions). Rank 0 posts the id of the world on the bulletin; each rank waits at most
    /// `patience` for that, and for the others.
    ///
    /// # Errors
    /// [`CommError::Engine`] if there is no NCCL that can be used, no such device, or not all ranks come.
    pub fn open(
        device: usize,
        rank: usize,
        size: usize,
        bulletin: Arc<dyn Bulletin>,
        pool: Arc<BufferPool>,
        patience: Duration,
        options: NcclOptions,
    ) -> Result<Arc<Self>, CommError> {
        let library = Library::open().map_err(|error| super::error(error.to_string()))?;
        let driver = CudaDriver::new(device).map_err(super::error)?;
        let lender = CudaLender::new(device, &driver, options.order).map_err(super::error)?;
        let parts = Parts {
            library,
            driver,
            lender: Arc::new(lender),
            bulletin,
            pool,
            registered: options.registered,
            alone_too: options.alone_too,
        };
        Self::start_up(parts, rank, size, patience)
    }
}
