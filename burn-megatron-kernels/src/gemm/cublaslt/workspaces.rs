//! The workspaces of matrix multiplications. Each stream of the device has one workspace with a fixed address.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::result::malloc_sync;
use cudarc::driver::sys::{CUdeviceptr, CUstream};

/// The size of a workspace in bytes, as NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// One workspace per stream. It is allocated when it is first used, and never freed. Multiplications on the same stream
/// run one after the other and share the workspace.
#[derive(Debug, Default)]
pub(super) struct Workspaces(Mutex<HashMap<usize, CUdeviceptr>>);

impl Workspaces {
    /// Returns the address of the workspace of `stream`, or null if `bytes` is 0. The context of
    /// the device must be current.
    ///
    /// # Errors
    ///
    /// Returns an error if the device has no free memory.
    pub fn of_stream(&self, stream: CUstream, bytes: usize) -> Result<CUdeviceptr, String> {
        if bytes == 0 {
            return Ok(0);
        }
        let mut workspaces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = workspaces.get(&(stream as usize)) {
            return Ok(*address);
        }
        // SAFETY: the memory is never freed, and a multiplication reads only what it has written.
        let address = unsafe { malloc_sync(WORKSPACE) }
            .map_err(|error| format!("a workspace of {WORKSPACE} bytes: {error:?}"))?;
        workspaces.insert(stream as usize, address);
        Ok(address)
    }
}
