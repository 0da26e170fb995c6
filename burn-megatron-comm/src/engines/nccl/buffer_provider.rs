//! Access to the device memory of tensors for NCCL calls.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::buffers::DeviceBuffers;
use super::stream_order::StreamOrder;
use crate::error::CommError;

/// A function that wakes the worker after the buffers of a call have been resolved.
pub(super) type Wake = Box<dyn FnOnce() + Send>;

/// A function that returns the result of a call after the call has been launched.
pub(super) type TakeResult = Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>;

/// A provider of the device memory of tensors on one device.
pub(super) trait DeviceBufferProvider: fmt::Debug + Send + Sync {
    /// Returns whether the provider supports tensors on `device`.
    fn takes(&self, device: &Device) -> bool;

    /// Returns the order between NCCL calls and the computation on the device.
    fn stream_order(&self) -> StreamOrder;

    /// Describes the order, including the reasons why a faster order is not available.
    fn description(&self) -> String;

    /// Provides the memory of `input`, and the memory of a result with `output` elements of the type of `input`. The
    /// buffers may be resolved immediately or later. After they have been resolved, calls `wake`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the tensor is on a different device.
    fn provide(
        &self,
        input: Tensor<1>,
        output: usize,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> Result<TakeResult, CommError>;
}
