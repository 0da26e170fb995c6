//! Collectives and messages on tensors in device memory.

use std::fmt;

use burn::tensor::{Device, Tensor};

use crate::call::Call;
use crate::error::CommError;

/// Collectives and messages of a [`Communicator`](crate::Communicator) on tensors in device memory. Nothing is copied
/// through the host, and the host is not synchronized with the device.
///
/// Device operations are numbered, checked and ordered in the same way as host operations in
/// [`start_all`](crate::Communicator::start_all). Host and device operations may be mixed.
pub trait DeviceCommunicator: Send + Sync + fmt::Debug {
    /// Returns whether tensors on this device are supported. Tensors on other devices must be copied through host
    /// memory.
    fn takes(&self, device: &Device) -> bool;

    /// Returns whether a receive may be started before operations on which the sender of the message depends. If false,
    /// all later work on the device waits until the message of a started receive has arrived.
    fn allows_early_receives(&self) -> bool {
        true
    }

    /// Starts several operations on one-dimensional tensors at once. Returns one handle per operation, in the order of
    /// `calls`.
    ///
    /// The length of a result is documented in [`Call`]. A result has the type and the device of the input. The result
    /// of a send is empty.
    ///
    /// # Errors
    /// The errors of [`start_all`](crate::Communicator::start_all). [`CommError::Engine`] if the device of a tensor is
    /// not [supported](Self::takes).
    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError>;
}

/// A handle of an operation in flight on a tensor in device memory.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct DevicePending(Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>);

impl DevicePending {
    /// Creates a handle from a closure, which [`wait`](Self::wait) calls. The closure must wait with a timeout.
    pub fn new(wait: impl FnOnce() -> Result<Tensor<1>, CommError> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// Returns the result as soon as the operation is enqueued on the device. Does not wait until the operation is
    /// complete. Later work on the result tensor is ordered after the operation.
    ///
    /// # Errors
    /// [`CommError`] if the launch failed. If the operation fails on the device afterwards, a later call returns the
    /// error.
    pub fn wait(self) -> Result<Tensor<1>, CommError> {
        (self.0)()
    }
}

impl fmt::Debug for DevicePending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DevicePending")
    }
}
