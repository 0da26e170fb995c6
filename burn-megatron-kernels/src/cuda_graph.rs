//! CUDA graphs: kernel launches that are captured once and then replayed by a single call from the host.
//!
//! A replay runs the captured kernels on the same memory addresses. Tensors whose values change between replays must
//! therefore stay at the same address. [`memory_id`] returns an identifier of the memory of a tensor. A replay does not
//! run the host code of the captured function again.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::{Backend, BackendTypes, Dispatch};
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Tensor};

use crate::launch;

/// A captured CUDA graph.
pub struct CudaGraph {
    graph: <Dispatch as BackendTypes>::GraphPrimitive,
    device: Device,
}

/// Error of a failed CUDA graph call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed on {device}: {message}")]
pub struct CudaGraphError {
    /// The name of the failed call.
    pub call: &'static str,
    /// A description of the device.
    pub device: String,
    /// The error message of the device.
    pub message: String,
}

impl CudaGraph {
    /// Prepares the device for a capture. After this call and before [`capture`](Self::capture), run the body once, so
    /// that its kernels are compiled and its memory is allocated.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if the device does not support CUDA graphs, or if another graph is being captured on
    /// the device.
    pub fn prepare(device: &Device) -> Result<(), CudaGraphError> {
        let device = device.clone().inner();
        let prepared = Dispatch::graph_prepare(device.as_dispatch());
        prepared.map_err(|error| failed("graph_prepare", &device, error))
    }

    /// Captures the kernel launches of `body` without running the kernels.
    ///
    /// `body` must not read values from the device and must not synchronize with the device. It must not allocate more
    /// memory than its previous run without a capture has freed. Other threads must not use the device during the
    /// capture.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if `body` breaks these rules.
    pub fn capture<T>(
        device: &Device,
        body: impl FnOnce() -> T,
    ) -> Result<(Self, T), CudaGraphError> {
        let device = device.clone().inner();
        let began = Dispatch::graph_start_capture(device.as_dispatch());
        began.map_err(|error| failed("graph_start_capture", &device, error))?;
        // The capture must end even after a panic. Otherwise the device would capture all later work.
        let result = catch_unwind(AssertUnwindSafe(body));
        let graph = Dispatch::graph_stop_capture(device.as_dispatch());
        let result = result.unwrap_or_else(|panic| resume_unwind(panic));
        let graph = graph.map_err(|error| failed("graph_stop_capture", &device, error))?;
        Ok((Self { graph, device }, result))
    }

    /// Launches the captured kernels without waiting for them to finish.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if the launch fails.
    ///
    /// # Safety
    ///
    /// Every tensor that the captured function used but did not create must still exist at the same memory address. No
    /// work on another stream or thread may use memory that the graph reads or writes.
    pub unsafe fn replay(&self) -> Result<(), CudaGraphError> {
        // SAFETY: the caller keeps the tensors that the captured function used.
        let replayed = unsafe { Dispatch::graph_replay(self.device.as_dispatch(), &self.graph) };
        replayed.map_err(|error| failed("graph_replay", &self.device, error))
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph on {:?}", self.device)
    }
}

fn failed(call: &'static str, device: &Device, error: impl fmt::Display) -> CudaGraphError {
    CudaGraphError {
        call,
        device: format!("{device:?}"),
        message: error.to_string(),
    }
}

/// Returns an identifier of the memory of a tensor. Two tensors have the same identifier only if they share memory, as
/// views of one tensor do. Returns `None` on the CPU backend and with Burn's fusion, which provide no identifier.
pub fn memory_id<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Option<usize> {
    launch::memory_id(&tensor.clone().into_dispatch())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_no_graphs() {
        let device = Device::flex();
        let error = CudaGraph::capture(&device, || ()).unwrap_err();
        assert_eq!(error.call, "graph_start_capture");
        assert_eq!(memory_id(&Tensor::<1>::zeros([1], &device)), None);
    }
}
