//! Provides the device memory of tensors for NCCL calls.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::buffers::DeviceBuffers;
use super::stream_order::StreamOrder;
use crate::error::CommError;

/// Wakes the worker when buffers are resolved.
pub(super) type Wake = Box<dyn FnOnce() + Send>;

/// Takes the result of a call, once the call is launched.
pub(super) type TakeResult = Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>;

/// Provides the device memory of the tensors of one device.
pub(super) trait DeviceBufferProvider: fmt::Debug + Send + Sync {
    /// Returns whether it provides the memory of tensors on `device`.
    fn takes(&self, device: &Device) -> bool;

    /// Returns the order of calls and of the computation on the device.
    fn stream_order(&self) -> StreamOrder;

    /// Returns the order, with the reasons why it is not a faster one.
    fn description(&self) -> String;

    /// Provides the memory of `input` and of a result of `output` elements of its type: resolves the buffers, now or
    /// later, and then calls `wake`.
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
