//! Replays recorded operations one at a time on a device with values.

#[cfg(any(feature = "cuda", feature = "wgpu"))]
use burn::backend::Cube;
use burn::backend::tensor::FloatTensor;
use burn::backend::{DispatchDevice, DispatchTensor, Flex};
use burn::tensor::{Device, TensorData, try_read_sync};
use burn_ir::{BackendIr, HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{CustomOpRegistry, TensorInterpreter};

use super::RecordedCall;
use crate::function::{SharedFunction, forward};

/// An interpreter that runs the operations of a [`Recording`](super::Recording) on given values.
///
/// A tensor is identified by its number in the recording. A tensor is kept until an operation consumes it, or until
/// [`forget`](Self::forget) frees it. An operation consumes its inputs with the status read-write.
pub struct Replay(Box<dyn Interpreter>);

impl Replay {
    /// Creates a replay on `device`. With the feature `fusion`, GPU operations whose intermediate results are not read
    /// are fused, as in a normal program. Returns `None` for a device that is neither the CPU (Flex) nor a CubeCL
    /// device.
    pub fn new(device: &Device) -> Option<Self> {
        of_device(device.as_dispatch())
    }

    /// Creates a replay on a GPU without fusing operations, even if the feature `fusion` is enabled. Returns `None` for
    /// devices on which [`new`](Self::new) does not fuse operations.
    ///
    /// Function [calls](Self::call) are not supported.
    pub fn unfused(device: &Device) -> Option<Self> {
        unfused(device.as_dispatch())
    }

    /// Sets the values of a tensor, which is identified by `id`.
    pub fn set(&mut self, id: TensorId, values: TensorData) {
        self.0.set(id, values);
    }

    /// Runs an operation. All inputs of the operation must exist in the replay.
    ///
    /// # Panics
    ///
    /// Panics in the same cases as the operation. Also panics for a custom operation. Use [`call`](Self::call) for the
    /// custom operations of a [`Function`](crate::Function).
    pub fn run(&mut self, operation: OperationIr) {
        self.0.run(operation);
    }

    /// Runs the forward pass of a function call with these inputs and outputs. Returns false if the replay does not
    /// support calls.
    pub fn call(&mut self, call: &RecordedCall, inputs: &[TensorIr], outputs: &[TensorIr]) -> bool {
        self.0.call(call, inputs, outputs)
    }

    /// Returns the values of a tensor.
    ///
    /// # Errors
    ///
    /// Returns an error if the device reports an error.
    pub fn read(&mut self, tensor: &TensorIr) -> Result<TensorData, String> {
        self.0.read(TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        })
    }

    /// Frees a tensor, if it exists.
    pub fn forget(&mut self, tensor: &TensorIr) {
        self.0.run(OperationIr::Drop(tensor.clone()));
    }
}

trait Interpreter {
    fn set(&mut self, id: TensorId, values: TensorData);
    fn run(&mut self, operation: OperationIr);
    fn call(&mut self, call: &RecordedCall, inputs: &[TensorIr], outputs: &[TensorIr]) -> bool;
    fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String>;
}

/// The replay on one backend.
struct Of<B: BackendIr> {
    interpreter: TensorInterpreter<B>,
    /// The function that runs a forward pass on this backend, if [`DispatchTensor`] supports the backend.
    forward: Option<Forward<B>>,
}

type Forward<B> =
    fn(Vec<FloatTensor<B>>, &SharedFunction) -> (Vec<FloatTensor<B>>, Vec<DispatchTensor>);

fn boxed<B: BackendIr>(device: &B::Device, forward: Option<Forward<B>>) -> Replay
where
    Of<B>: 'static,
{
    let registry = CustomOpRegistry::<B>::default();
    let interpreter = TensorInterpreter::with_custom_ops(device.clone(), registry);
    Replay(Box::new(Of {
        interpreter,
        forward,
    }))
}

fn of_device(device: &DispatchDevice) -> Option<Replay> {
    match device {
        DispatchDevice::Autodiff(device) => of_device(device),
        DispatchDevice::Flex(device) => Some(boxed::<Flex>(device, Some(forward::<Flex>))),
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        DispatchDevice::Cube(device) => Some(boxed::<Cube>(device, Some(forward::<Cube>))),
        _ => None,
    }
}

fn unfused(device: &DispatchDevice) -> Option<Replay> {
    match device {
        DispatchDevice::Autodiff(device) => unfused(device),
        #[cfg(all(any(feature = "cuda", feature = "wgpu"), feature = "fusion"))]
        DispatchDevice::Cube(device) => Some(boxed::<burn_cubecl::CubeBackend>(device, None)),
        _ => None,
    }
}

impl<B: BackendIr> Interpreter for Of<B> {
    fn set(&mut self, id: TensorId, values: TensorData) {
        self.interpreter.register_tensor_data_id(id, values);
    }

    fn run(&mut self, operation: OperationIr) {
        self.interpreter.register_op(operation);
    }

    fn call(&mut self, call: &RecordedCall, inputs: &[TensorIr], outputs: &[TensorIr]) -> bool {
        let Some(forward) = self.forward else {
            return false;
        };
        let float = |tensor: &TensorIr| match self.interpreter.get_tensor(tensor) {
            HandleKind::Float(tensor) => tensor,
            other => panic!(
                "a call has float tensors, {} has {}",
                call.name,
                other.name()
            ),
        };
        let inputs = inputs.iter().map(float).collect();
        let (made, _) = forward(inputs, &call.function);
        for (tensor, value) in outputs.iter().zip(made) {
            let value = HandleKind::Float(value);
            self.interpreter.register_tensor_to_device(tensor.id, value);
        }
        true
    }

    fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String> {
        let data = try_read_sync(self.interpreter.read_tensor_async(tensor));
        let data = data.ok_or_else(|| "the device cannot be waited for here".to_string())?;
        data.map_err(|error| error.to_string())
    }
}
