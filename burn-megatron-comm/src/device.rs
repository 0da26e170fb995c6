//! Calls on tensors that stay on their device.

use std::fmt;

use burn::tensor::{Device, Tensor};

use super::call::Call;
use super::error::CommError;

/// The calls of a [`Communicator`](super::Communicator) on tensors that lie on a device which its engine
/// reaches: nothing passes through host memory, and nobody waits for the device.
///
/// The numbering, the checks and the order are those of [`start_all`](super::Communicator::start_all); both
/// ways may be mixed.
pub trait OnDevice: Send + Sync + fmt::Debug {
    /// Whether tensors of this device can be given. If not, they go through host memory.
    fn takes(&self, device: &Device) -> bool;

    /// Starts calls on plain tensors, `[n]` each, as one; the handles are in the order of the calls.
    ///
    /// The result of a call has the length that [`Call`] says, and the type and the device of the tensor
    /// that was given. That of a send is empty.
    ///
    /// # Errors
    /// As [`start_all`](super::Communicator::start_all); [`CommError::Engine`] also if a tensor does not lie
    /// on a device that is [taken](Self::takes).
    fn start(&self, calls: Vec<(Call, Tensor<1>)>) -> Result<Vec<DevicePending>, CommError>;
}

/// A call on a tensor that was started and whose result is still to be fetched.
#[must_use = "a call that is never waited on gives no result and reports no error"]
pub struct DevicePending(Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>);

impl DevicePending {
    /// A handle whose wait runs `wait`, which waits with a deadline.
    pub fn new(wait: impl FnOnce() -> Result<Tensor<1>, CommError> + Send + 'static) -> Self {
        Self(Box::new(wait))
    }

    /// The result, as soon as the device has been told to compute what follows behind the call. That the
    /// call has taken place is not waited for.
    ///
    /// # Errors
    /// Whatever kept the call from being launched: see [`CommError`]. What fails later on the device is
    /// the error of a later call.
    pub fn wait(self) -> Result<Tensor<1>, CommError> {
        (self.0)()
    }
}

impl fmt::Debug for DevicePending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DevicePending")
    }
}
