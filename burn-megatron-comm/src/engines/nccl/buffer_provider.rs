//! Provides the device memory of tensors for NCCL calls.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::buffers::DeviceBuffers;
use super::stream_order::StreamOrder;
use crate::error::CommError;

/// Wakes the worker after the buffers have been resolved.
pub(super) type Wake = Box<dyn FnOnce() + Send>;

/// Takes the result of a call after the call has been launched.
pub(super) type TakeResult = Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>;

/// Provides the device memory of the tensors of one device.
pub(super) trait DeviceBufferProvider: fmt::Debug + Send + Sync {
    /// Returns whether the provider supports tensors on `device`.
    fn takes(&self, device: &Device) -> bool;

    /// Returns how calls are ordered with the computation on the device.
    fn stream_order(&self) -> StreamOrder;

    /// Describes the order, with the reasons why a faster order is not available.
    fn description(&self) -> String;

    /// Provides the memory of `input`, and of a result with `output` elements of the type of `input`. Resolves the
    /// buffers, now or later, and then calls `wake`.
    ///
    /// # Errors
    /// [`CommError::Engine`] if the tensor is on another device.
    fn provide(
        &self,
        input: Tensor<1>,
        output: usize,
        buffers: Arc<DeviceBuffers>,
        wake: Wake,
    ) -> Result<TakeResult, CommError>;
}
