//! CUDA graphs: launches that are captured once and replayed by one call of the host.
//!
//! A replay runs the captured kernels on the same memory. Tensors that the caller changes between
//! replays must therefore keep their memory, which [`memory_id`] identifies. The host code of the
//! body does not run again.

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

/// The error of a failed call of the device's graph functions.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed on {device}: {message}")]
pub struct CudaGraphError {
    /// The name of the call.
    pub call: &'static str,
    /// A description of the device.
    pub device: String,
    /// The error message of the device.
    pub message: String,
}

impl CudaGraph {
    /// Prepares a capture. Run the body once after this call, so that its kernels are compiled and
    /// its memory is allocated.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if the device does not support graphs, or if another graph of the device is being
    /// captured.
    pub fn prepare(device: &Device) -> Result<(), CudaGraphError> {
        let device = device.clone().inner();
        let prepared = Dispatch::graph_prepare(device.as_dispatch());
        prepared.map_err(|error| failed("graph_prepare", &device, error))
    }

    /// Captures the launches of `body` without running them.
    ///
    /// `body` must not read from the device or wait for it. It must not allocate more memory than
    /// the previous run has freed. Other threads must not use the device during the capture.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if the body breaks these rules.
    pub fn capture<T>(
        device: &Device,
        body: impl FnOnce() -> T,
    ) -> Result<(Self, T), CudaGraphError> {
        let device = device.clone().inner();
        let began = Dispatch::graph_start_capture(device.as_dispatch());
        began.map_err(|error| failed("graph_start_capture", &device, error))?;
        // The capture must end even after a panic. Otherwise the device would record all later work.
        let result = catch_unwind(AssertUnwindSafe(body));
        let graph = Dispatch::graph_stop_capture(device.as_dispatch());
        let result = result.unwrap_or_else(|panic| resume_unwind(panic));
        let graph = graph.map_err(|error| failed("graph_stop_capture", &device, error))?;
        Ok((Self { graph, device }, result))
    }

    /// Launches the graph without waiting for it.
    ///
    /// # Errors
    ///
    /// Returns [`CudaGraphError`] if the launch fails.
    ///
    /// # Safety
    ///
    /// Every tensor that the body used and did not create must still have the same memory. No work
    /// of another stream or thread may use memory that the graph reads or writes.
    pub unsafe fn replay(&self) -> Result<(), CudaGraphError> {
        // SAFETY: the caller keeps the tensors of the body.
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

/// Returns an identifier of a tensor's memory. Views of a tensor have the same identifier. Two tensors have the same
/// identifier only if they share memory. Returns `None` on the CPU and with Burn's fusion, where tensors have no
/// identifier.
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
