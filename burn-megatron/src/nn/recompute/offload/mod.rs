//! The saved inputs of recomputed blocks in the memory of the host, from the forward to the backward.
//!
//! The inputs of a forward are a chain, which its backward takes from the end. The last `prefetch` of them stay on the
//! device, as the backward needs them at once; when another is saved, the oldest of those leaves for the host, unless the
//! budget is spent. The backward of a block fetches the `prefetch` inputs before its own while it runs. One input at
//! most is on its way to the host: a forward that is ahead of its copies would keep what they are to free.

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

/// Which saved inputs of recomputed blocks are kept on the host. Needs blocks that are recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ActivationOffload {
    /// The most bytes of a rank on the host at once; 0 keeps all on the device.
    pub bytes: u64,
    /// The number of blocks ahead of the backward for which inputs are fetched; 0 fetches an input when it is needed.
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

/// The bytes of saved inputs of recomputed blocks: now, at most so far, and transferred so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationUsage {
    /// On the device, those on their way to or from it included.
    pub device: u64,
    /// The most on the device.
    pub device_peak: u64,
    /// On the host, those on their way to or from it included.
    pub host: u64,
    /// The most on the host.
    pub host_peak: u64,
    /// The transferred bytes.
    pub traffic: HostTraffic,
}

/// In a recording: the input that this block saves may be on the host.
pub struct OffloadNote;

/// The input of a block, with its shape, once the block has saved it.
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

    /// Keeps the input until [`take`](Self::take).
    pub fn save(&self, x: DispatchTensor) {
        let x = Tensor::<D>::from_dispatch(x);
        let shape = x.dims();
        let number = self
            .store
            .save(x.reshape([shape.iter().product::<usize>()]));
        *self.saved.lock() = Some((number, shape));
    }

    /// The input on its device, if it was saved here. Waits for the host.
    ///
    /// Unwinds with [`raise`](crate::comm::raise) if a copy fails or takes too long.
    pub fn take(&self) -> Option<DispatchTensor> {
        let (number, shape) = self.saved.lock().take()?;
        let x: Tensor<D> = self.store.take(number).reshape(shape);
        Some(x.into_dispatch())
    }
}

/// A block without a backward.
impl<const D: usize> Drop for SavedInput<D> {
    fn drop(&mut self) {
        if let Some((number, _)) = self.saved.get_mut().take() {
            self.store.forget(number);
        }
    }
}
