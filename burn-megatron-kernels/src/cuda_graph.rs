//! CUDA graphs: launches that are captured once, and replayed by one call of the host.
//!
//! A replay runs the captured kernels on the memory that they had, so what a caller changes between replays must stay where it
//! is: [`memory_id`] tells. The host code of the body does not run again.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::{Backend, BackendTypes, Dispatch};
use burn::tensor::kind::Basic;
use burn::tensor::{Device, Tensor};

use crate::launch;

/// A captured graph.
pub struct CudaGraph {
    graph: <Dispatch as BackendTypes>::GraphPrimitive,
    device: Device,
}

/// A call of the device's graph functions that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed on {device}: {message}")]
pub struct CudaGraphError {
    /// The call.
    pub call: &'static str,
    /// The device, in words.
    pub device: String,
    /// The message of the device.
    pub message: String,
}

impl CudaGraph {
    /// Prepares a capture. Run the body once after it, which compiles its kernels and allocates its memory.
    ///
    /// # Errors
    ///
    /// [`CudaGraphError`] on a device without graphs, and while another graph of the device is captured.
    pub fn prepare(device: &Device) -> Result<(), CudaGraphError> {
        let device = device.clone().inner();
        let prepared = Dispatch::graph_prepare(device.as_dispatch());
        prepared.map_err(|error| failed("graph_prepare", &device, error))
    }

    /// Captures what `body` launches, which does not run. `body` must neither read from the device nor wait for it, and
    /// allocate no more than the run before it has freed. Other threads must not use the device meanwhile.
    ///
    /// # Errors
    ///
    /// [`CudaGraphError`] if the body did something else.
    pub fn capture<T>(
        device: &Device,
        body: impl FnOnce() -> T,
    ) -> Result<(Self, T), CudaGraphError> {
        let device = device.clone().inner();
        let began = Dispatch::graph_start_capture(device.as_dispatch());
        began.map_err(|error| failed("graph_start_capture", &device, error))?;
        // The capture must end: the device would record all that follows.
        let result = catch_unwind(AssertUnwindSafe(body));
        let graph = Dispatch::graph_stop_capture(device.as_dispatch());
        let result = result.unwrap_or_else(|panic| resume_unwind(panic));
        let graph = graph.map_err(|error| failed("graph_stop_capture", &device, error))?;
        Ok((Self { graph, device }, result))
    }

    /// Launches the graph. Does not wait for it.
    ///
    /// # Errors
    ///
    /// [`CudaGraphError`] if the launch fails.
    ///
    /// # Safety
    ///
    /// Every tensor that the body used and did not create must still have the memory that it had, and no work of another
    /// stream or thread may use what the graph reads or writes.
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

/// The number of the memory that a tensor is in: equal for views of it, and for two tensors only if they share it. `None` where
/// tensors have no such number: on the CPU, and with Burn's fusion.
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
