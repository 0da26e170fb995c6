//! What an engine does for tensors that stay on their device.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use super::slot::Slot;
use super::transport::GroupId;
use crate::buffer::DType;
use crate::call::Signature;
use crate::communicator::Group;
use crate::error::CommError;

/// This rank's part in one call on a tensor, ready to be carried out.
#[derive(Debug)]
#[allow(dead_code, reason = "only the engine nccl reads them, and not all")]
pub(crate) struct DeviceJob {
    /// The group, seen from this rank.
    pub group: Arc<Group>,
    /// The number of the group.
    pub group_id: GroupId,
    /// The number of the call, as in a [`Job`](super::transport::Job).
    pub sequence: u64,
    /// The operation with its type and length; it has been checked.
    pub signature: Arc<Signature>,
    /// What this rank gives, a plain tensor `[n]`; for a receive an empty one on the device.
    pub input: Tensor<1>,
    /// Gets an empty buffer when the device has passed the call, or what kept it from that: for the log,
    /// and for whoever watches the deadline.
    pub passed: Arc<Slot>,
}

/// A call on a tensor that was handed over.
pub(crate) struct DeviceFlight {
    /// Gets an empty buffer when the result may be asked for, or what kept the call from being launched.
    pub launched: Arc<Slot>,
    /// The result, which does not wait for the device: what is computed with it from now on is put behind
    /// the call. To be called after `launched`.
    pub result: Box<dyn FnOnce() -> Result<Tensor<1>, CommError> + Send>,
}

impl fmt::Debug for DeviceFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceFlight({:?})", self.launched)
    }
}

/// The part of a transport that moves tensors which lie on its device.
///
/// Its calls and those of the [`Transport`](super::transport::Transport) have one order.
pub(crate) trait DeviceTransport: fmt::Debug + Send + Sync {
    /// Whether tensors of this device can be given.
    fn takes(&self, device: &Device) -> bool;

    /// Starts calls of one group, in this order, as one launch if it can. Waits for no other rank and not
    /// for the device.
    ///
    /// # Errors
    /// [`CommError::Engine`] if a tensor cannot be lent; nothing was started then.
    fn start_on_device(&self, jobs: Vec<DeviceJob>) -> Result<Vec<DeviceFlight>, CommError>;
}

/// The type of the elements of a float tensor of `dtype`, if it can travel.
pub(crate) fn device_type(dtype: burn::tensor::DType) -> Option<DType> {
    use burn::tensor::DType as Tensors;
    match dtype {
        Tensors::F64 => Some(DType::F64),
        Tensors::F32 | Tensors::Flex32 => Some(DType::F32),
        Tensors::BF16 => Some(DType::BF16),
        Tensors::F16 => Some(DType::F16),
        _ => None,
    }
}
