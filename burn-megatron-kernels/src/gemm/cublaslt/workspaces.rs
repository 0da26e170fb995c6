//! The memory that products work in, at one address for each stream of the device.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::malloc_sync;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

/// The bytes of a workspace: the size that NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// One workspace per stream, allocated on first use and kept. Products of one stream run one after the other, so
/// they share it.
#[derive(Debug, Default)]
pub(super) struct Workspaces(Mutex<HashMap<usize, CUdeviceptr>>);

impl Workspaces {
    /// The address of the workspace of `stream`; null for a product that needs no `bytes`. The context of the
    /// device must be current.
    ///
    /// # Errors
    ///
    /// If the device has no memory left.
    pub fn of_stream(&self, stream: CUstream, bytes: usize) -> Result<CUdeviceptr, String> {
        if bytes == 0 {
            return Ok(0);
        }
        let mut workspaces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = workspaces.get(&(stream as usize)) {
            return Ok(*address);
        }
        // SAFETY: the memory is never freed, and only read by products that wrote it.
        let address = unsafe { malloc_sync(WORKSPACE) }
            .map_err(|error| format!("a workspace of {WORKSPACE} bytes: {error:?}"))?;
        workspaces.insert(stream as usize, address);
        Ok(address)
    }
}
