//! Calls on tensors in device memory.

use std::fmt;

use burn::tensor::{Device, Tensor};

use crate::call::Call;
use crate::error::CommError;

/// The calls of a [`Communicator`](crate::Communicator) on tensors in device memory. Nothing is copied through the
/// host, and the host is not synchronized with the device.
///
/// Calls are numbered, checked and ordered as in [`start_all`](crate::Communicator::start_all). Host and device calls
/// may be mixed.
pub trait DeviceCommunicator: Send + Sync + fmt::Debug {
    /// Returns whether tensors on this device are supported. Other tensors must go through host memory.
    fn takes(&self, device: &Device) -> bool;

    /// Returns whether a receive may be started before calls that its sender waits for. If false, all later work on the
    /// device waits for the receives that were started earlier.
    fn allows_early_receives(&self) -> bool {
        true
    }

    /// Starts calls on plain tensors, `[n]` each, at once. Returns the handles in the order of the calls.
    ///
    /// A result has the length that [`Call`] documents, and the type and device of the input. The result of a send is
    /// empty.
    ///
    /// # Errors
    /// The errors of [`start_all`](crate::Communicator::start_all). [`CommError::Engine`] if the device of a tensor is
    /// not [supported](Self::takes).
    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError>;
}

/// A handle of a call on a tensor in flight.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct DevicePending(Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>);

impl DevicePending {
    /// Creates a handle. [`wait`](Self::wait) calls the closure, which waits with a deadline.
    pub fn new(wait: impl FnOnce() -> Result<Tensor<1>, CommError> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Returns the result once the call is enqueued on the device. Later work on the tensor is ordered after the call.
    /// Does not wait for the call to execute.
    ///
    /// # Errors
    /// [`CommError`] if the launch failed. A later failure on the device is returned by a later call.
    pub fn wait(self) -> Result<Tensor<1>, CommError> {
        (self.0)()
    }
}

impl fmt::Debug for DevicePending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DevicePending")
    }
}
