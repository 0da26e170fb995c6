//! Offloading of the saved inputs of recomputed blocks to host memory, between the forward pass and the backward pass.
//!
//! The saved inputs of a forward pass form a chain, which the backward pass reads in reverse order. The last `prefetch`
//! inputs stay on the device, because the backward pass needs them immediately. When another input is saved, the oldest
//! input on the device is copied to the host, unless the budget is used up. While the backward of a block runs, the
//! inputs of the `prefetch` preceding blocks are fetched. At most one input is being copied to the host at a time. With
//! more copies in flight, a forward pass that is faster than the copies would keep the memory that the copies should
//! free.
//!
//! Copying the input of a pipeline stage frees no memory, because the device keeps this input for its gradient.

mod store;
#[cfg(test)]
mod tests;
mod threads;

use std::sync::Arc;

use burn::backend::DispatchTensor;
use burn::tensor::Tensor;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::host_link::HostTraffic;

pub(super) use store::ActivationStore;

/// Settings of offloading the saved inputs of recomputed blocks to host memory. Offloading requires activation
/// recomputation.
///
/// ```
/// use burn_megatron::nn::{ActivationOffload, RecomputeConfig, RecomputeMethod};
///
/// let offload = ActivationOffload { bytes: 8 << 30, ..ActivationOffload::default() };
/// let config = RecomputeConfig { offload, ..RecomputeConfig::full(RecomputeMethod::Uniform, 1) };
/// config.check()?;
/// // Without recomputed blocks there are no inputs to offload.
/// assert!(RecomputeConfig { offload, ..RecomputeConfig::default() }.check().is_err());
/// # Ok::<(), burn_megatron::nn::RecomputeError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActivationOffload {
    /// The maximum number of bytes of host memory per rank. 0 keeps all inputs on the device.
    pub bytes: u64,
    /// The number of blocks for which the backward pass fetches inputs ahead of time. 0 fetches an input only when it
    /// is needed.
    pub prefetch: usize,
}

impl Default for ActivationOffload {
    fn default() -> Self {
        Self {
            bytes: 0,
            prefetch: 1,
        }
    }
}

/// The memory usage of the saved inputs of recomputed blocks, and the number of bytes transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationUsage {
    /// The current number of bytes on the device, including inputs that are being copied.
    pub device: u64,
    /// The maximum of `device` so far.
    pub device_peak: u64,
    /// The current number of bytes on the host, including inputs that are being copied.
    pub host: u64,
    /// The maximum of `host` so far.
    pub host_peak: u64,
    /// The number of bytes transferred so far between the device and the host.
    pub traffic: HostTraffic,
}

/// A marker in a recording of operations, for a block whose saved input may be on the host.
pub struct OffloadNote;

/// The input of a block, with its number and shape once the block has saved it.
pub(super) struct SavedInput<const D: usize> {
    store: Arc<ActivationStore>,
    saved: Mutex<Option<(u64, [usize; D])>>,
}

impl<const D: usize> SavedInput<D> {
    pub fn new(store: &Arc<ActivationStore>) -> Self {
        Self {
            store: store.clone(),
            saved: Mutex::default(),
        }
    }

    /// Saves the input until [`take`](Self::take) is called.
    pub fn save(&self, x: DispatchTensor) {
        let x = Tensor::<D>::from_dispatch(x);
        let shape = x.dims();
        let number = self
            .store
            .save(x.reshape([shape.iter().product::<usize>()]));
        *self.saved.lock() = Some((number, shape));
    }

    /// Returns the input on its device, if it was saved here. Waits for the copy.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if a copy fails or takes too long.
    pub fn take(&self) -> Option<DispatchTensor> {
        let (number, shape) = self.saved.lock().take()?;
        let x: Tensor<D> = self.store.take(number).reshape(shape);
        Some(x.into_dispatch())
    }
}

/// Drops the input of a block without a backward pass.
impl<const D: usize> Drop for SavedInput<D> {
    fn drop(&mut self) {
        if let Some((number, _)) = self.saved.get_mut().take() {
            self.store.forget(number);
        }
    }
}
