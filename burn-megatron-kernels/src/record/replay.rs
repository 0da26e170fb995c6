//! Recorded operations, one at a time, on a device with values.

use burn::backend::{Backend, DispatchDevice, DispatchKindConversion, DispatchTensor, Flex};
use burn::tensor::{Device, TensorData, try_read_sync};
use burn_ir::{BackendIr, HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{CustomOpRegistry, TensorInterpreter};

use super::RecordedCall;
use crate::function::forward;

/// Runs operations of a [`Recording`](super::Recording) on the values that it is given.
///
/// A tensor is known by its number in the recording, and lives until an operation has consumed it (its status there is
/// read-write) or it is [forgotten](Self::forget).
pub struct Replay(Box<dyn Interpreter>);

impl Replay {
    /// Operations on `device` as a program would run them there: with the feature `fusion` a GPU fuses those that nothing
    /// reads in between. `None` for a device that is neither the CPU (Flex) nor one of CubeCL's.
    pub fn new(device: &Device) -> Option<Self> {
        of_device(device.as_dispatch())
    }

    /// Operations on a GPU without fusion, in a build with it; `None` where [`new`](Self::new) does not fuse either.
    ///
    /// [Calls](Self::call) are not supported.
    pub fn unfused(device: &Device) -> Option<Self> {
        unfused(device.as_dispatch())
    }

    /// Gives a tensor its values.
    pub fn set(&mut self, id: TensorId, values: TensorData) {
        self.0.set(id, values);
    }

    /// Runs an operation whose inputs are there.
    ///
    /// # Panics
    ///
    /// As the operation, and for a custom operation: see [`call`](Self::call).
    pub fn run(&mut self, operation: OperationIr) {
        self.0.run(operation);
    }

    /// Runs the forward of a call, of these inputs into these outputs; false if it cannot be run here.
    pub fn call(&mut self, call: &RecordedCall, inputs: &[TensorIr], outputs: &[TensorIr]) -> bool {
        self.0.call(call, inputs, outputs)
    }

    /// The values of a tensor.
    ///
    /// # Errors
    ///
    /// The error that the device reports.
    pub fn read(&mut self, tensor: &TensorIr) -> Result<TensorData, String> {
        self.0.read(TensorIr {
            status: TensorStatus::ReadOnly,
            ..tensor.clone()
        })
    }

    /// Frees a tensor, if it is there.
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

/// Of a backend that [`DispatchTensor`] has, or else without calls.
struct Of<B: BackendIr, const CALLS: bool>(TensorInterpreter<B>);

fn boxed<B: BackendIr, const CALLS: bool>(device: &B::Device) -> Replay
where
    Of<B, CALLS>: Interpreter + 'static,
{
    let registry = CustomOpRegistry::default();
    Replay(Box::new(Of::<B, CALLS>(
        TensorInterpreter::with_custom_ops(device.clone(), registry),
    )))
}

fn of_device(device: &DispatchDevice) -> Option<Replay> {
    match device {
        DispatchDevice::Autodiff(device) => of_device(device),
        DispatchDevice::Flex(device) => Some(boxed::<Flex, true>(device)),
        #[cfg(any(feature = "cuda", feature = "wgpu"))]
        DispatchDevice::Cube(device) => Some(boxed::<burn::backend::Cube, true>(device)),
        _ => None,
    }
}

fn unfused(device: &DispatchDevice) -> Option<Replay> {
    match device {
        DispatchDevice::Autodiff(device) => unfused(device),
        #[cfg(all(any(feature = "cuda", feature = "wgpu"), feature = "fusion"))]
        DispatchDevice::Cube(device) => Some(boxed::<burn_cubecl::CubeBackend, false>(device)),
        _ => None,
    }
}

fn read<B: BackendIr>(
    interpreter: &mut TensorInterpreter<B>,
    tensor: TensorIr,
) -> Result<TensorData, String> {
    let data = try_read_sync(interpreter.read_tensor_async(tensor));
    let data = data.ok_or_else(|| "the device cannot be waited for here".to_string())?;
    data.map_err(|error| error.to_string())
}

#[cfg(all(any(feature = "cuda", feature = "wgpu"), feature = "fusion"))]
impl<B: BackendIr> Interpreter for Of<B, false> {
    fn set(&mut self, id: TensorId, values: TensorData) {
        self.0.register_tensor_data_id(id, values);
    }

    fn run(&mut self, operation: OperationIr) {
        self.0.register_op(operation);
    }

    fn call(&mut self, _: &RecordedCall, _: &[TensorIr], _: &[TensorIr]) -> bool {
        false
    }

    fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String> {
        read(&mut self.0, tensor)
    }
}

impl<B: BackendIr + Backend> Interpreter for Of<B, true>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn set(&mut self, id: TensorId, values: TensorData) {
        self.0.register_tensor_data_id(id, values);
    }

    fn run(&mut self, operation: OperationIr) {
        self.0.register_op(operation);
    }

    fn call(&mut self, call: &RecordedCall, inputs: &[TensorIr], outputs: &[TensorIr]) -> bool {
        let float = |tensor: &TensorIr| match self.0.get_tensor(tensor) {
            HandleKind::Float(tensor) => tensor,
            other => panic!(
                "a call has float tensors, {} has {}",
                call.name,
                other.name()
            ),
        };
        let inputs = inputs.iter().map(float).collect();
        let (made, _) = forward::<B>(inputs, &call.function);
        for (tensor, value) in outputs.iter().zip(made) {
            let value = HandleKind::Float(value);
            self.0.register_tensor_to_device(tensor.id, value);
        }
        true
    }

    fn read(&mut self, tensor: TensorIr) -> Result<TensorData, String> {
        read(&mut self.0, tensor)
    }
}
