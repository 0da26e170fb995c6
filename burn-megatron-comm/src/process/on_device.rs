//! The device-memory interface of a transport.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::result_slot::ResultSlot;
use super::transport::Job;
use crate::buffer::DType;
use crate::error::CommError;

/// A job of the transport: a call on a plain tensor `[n]`.
pub(crate) type DeviceJob = Job<Tensor<1>>;

/// A submitted call on a tensor.
pub(crate) struct InFlightDeviceCall {
    /// Set to an empty buffer once `result` may be called, or to the error of the launch.
    pub launched: Arc<ResultSlot>,
    /// Returns the result without waiting for the device. Later work on the result is ordered after the call. Call this
    /// after `launched` is set.
    pub result: Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>,
}

impl fmt::Debug for InFlightDeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlightDeviceCall({:?})", self.launched)
    }
}

/// The device-memory interface of a transport, for calls on tensors.
///
/// Its calls and the calls of the [`Transport`](super::transport::Transport) share one order.
pub(crate) trait DeviceTransport: fmt::Debug + Send + Sync {
    /// Returns whether tensors on this device are supported.
    fn takes(&self, device: &Device) -> bool;

    /// Returns whether a receive may be started before calls that its sender waits for. See
    /// [`DeviceCommunicator`](crate::DeviceCommunicator::allows_early_receives).
    fn allows_early_receives(&self) -> bool;

    /// Starts calls of one group in this order, fused into one launch if possible. Waits neither for other ranks nor
    /// for the device.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the memory of a tensor cannot be accessed. No call is started then.
    fn start_on_device(&self, jobs: Vec<DeviceJob>) -> Result<Vec<InFlightDeviceCall>, CommError>;
}

/// Returns the element type for a float tensor of `dtype`, or `None` if calls do not support it.
pub(crate) fn device_type(dtype: burn::tensor::DType) -> Option<DType> {
    use burn::tensor::DType as TensorType;
    match dtype {
        TensorType::F64 => Some(DType::F64),
        TensorType::F32 | TensorType::Flex32 => Some(DType::F32),
        TensorType::BF16 => Some(DType::BF16),
        TensorType::F16 => Some(DType::F16),
        _ => None,
    }
}
