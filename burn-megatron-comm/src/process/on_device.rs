//! The interface of a transport for tensors in device memory.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::result_slot::ResultSlot;
use super::transport::Job;
use crate::buffer::DType;
use crate::error::CommError;

/// A job for the transport: a call on a one-dimensional tensor `[n]`.
pub(crate) type DeviceJob = Job<Tensor<1>>;

/// A call on a tensor that was passed to the transport.
pub(crate) struct InFlightDeviceCall {
    /// A slot that is set to an empty buffer as soon as `result` may be called, or to the error of the launch.
    pub launched: Arc<ResultSlot>,
    /// Returns the result without waiting for the device. Later work on the result is ordered after the call. Must be
    /// called after `launched` is set.
    pub result: Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>,
}

impl fmt::Debug for InFlightDeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InFlightDeviceCall({:?})", self.launched)
    }
}

/// The interface of a transport for calls on tensors in device memory.
///
/// These calls and the calls of the [`Transport`](super::transport::Transport) are executed in one common order.
pub(crate) trait DeviceTransport: fmt::Debug + Send + Sync {
    /// Returns whether tensors on this device are supported.
    fn takes(&self, device: &Device) -> bool;

    /// Returns whether a receive may be started before other calls for which its sender waits. See
    /// [`DeviceCommunicator`](crate::DeviceCommunicator::allows_early_receives).
    fn allows_early_receives(&self) -> bool;

    /// Starts calls of one group in the given order. If possible, they are fused into one launch. Does not wait for
    /// other ranks or for the device.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the memory of a tensor cannot be accessed. In this case, no call is started.
    fn start_on_device(&self, jobs: Vec<DeviceJob>) -> Result<Vec<InFlightDeviceCall>, CommError>;
}

/// Returns the element type of a floating-point tensor of type `dtype`, or `None` if calls do not support the type.
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
