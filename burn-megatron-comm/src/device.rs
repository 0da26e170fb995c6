//! Calls on tensors in device memory.

use std::fmt;

use burn::tensor::{Device, Tensor};

use crate::call::Call;
use crate::error::CommError;

/// The calls of a [`Communicator`](crate::Communicator) on tensors in device memory: no copy through the
/// host and no host-device synchronization.
///
/// Numbering, checks and order are those of [`start_all`](crate::Communicator::start_all); host and device
/// calls may be mixed.
pub trait DeviceCommunicator: Send + Sync + fmt::Debug {
    /// Whether tensors of this device are supported. Others must go through host memory.
    fn takes(&self, device: &Device) -> bool;

    /// Whether a receive may be started before calls that its sender waits for. If not, all work on the device waits for
    /// the receives that were started before it.
    fn allows_early_receives(&self) -> bool {
        true
    }

    /// Starts calls on plain tensors, `[n]` each, at once; the handles are in the order of the calls.
    ///
    /// A result has the length that [`Call`] states, and the type and the device of the input. That of a
    /// send is empty.
    ///
    /// # Errors
    /// As [`start_all`](crate::Communicator::start_all); [`CommError::Engine`] also if a tensor's device is
    /// not [supported](Self::takes).
    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError>;
}

/// The handle of a call on a tensor in flight.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct DevicePending(Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>);

impl DevicePending {
    /// A handle whose wait runs `wait`, which waits with a deadline.
    pub fn new(wait: impl FnOnce() -> Result<Tensor<1>, CommError> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// The result, once the call is enqueued on the device: later work on the tensor is ordered behind it.
    /// Does not wait for the call to execute.
    ///
    /// # Errors
    /// A failed launch: see [`CommError`]. A later failure on the device is the error of a later call.
    pub fn wait(self) -> Result<Tensor<1>, CommError> {
        (self.0)()
    }
}

impl fmt::Debug for DevicePending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DevicePending")
    }
}
