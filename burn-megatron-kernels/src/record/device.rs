//! The only module of the recording that uses the backend types of Burn.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::backend::tensor::FloatTensor;
use burn::backend::{
    BackendTensor, Capture, DispatchAutodiffContext, DispatchTensor, DispatchTensorKind,
};
use burn::tensor::kind::Basic;
use burn::tensor::{DType, Device, Tensor};
use burn_ir::{CustomOpIr, OperationIr, ScalarIr, TensorId, TensorIr};
use burn_router::{RouterClient, RouterTensor};

use super::{
    CURRENT, RecordError, RecordedCall, RecordedGradients, RecordedStep, Recorder, Recording,
    ShapeSettings, Stop, with,
};
use crate::function::{SharedFunction, forward};
use crate::launch::{DeviceOp, InPlace, Spec};

/// A tensor of the recording device, of any type.
pub(super) type Primitive = FloatTensor<Capture>;

/// The name of the operation that marks an event among the recorded operations.
const EVENT: &str = "burn-megatron event";

thread_local! {
    /// The capture device of a thread, which all recordings of the thread use. A process may create at most 65,536
    /// capture devices.
    static DEVICE: Device = Device::capture();
}

pub(super) fn capture<T>(
    settings: ShapeSettings,
    body: impl FnOnce(&Device) -> T,
) -> Result<(T, Recording), RecordError> {
    let device = DEVICE.with(Device::clone);
    let (mut result, mut recorded) = (None, None);
    let captured = catch_unwind(AssertUnwindSafe(|| {
        device.capture_scope(|scope| {
            let stop = Stop;
            let handle = handle(&device);
            CURRENT.replace(Some(Recorder {
                settings,
                handle,
                events: vec![],
                calls: vec![],
                backwards: vec![],
                inside: vec![],
                last: None,
                first_variable: None,
            }));
            let value = catch_unwind(AssertUnwindSafe(|| body(&device)));
            let recorder = CURRENT.replace(None);
            drop(stop);
            match value {
                Ok(value) => {
                    result = Some(value);
                    recorded = recorder.map(|it| (it.events, it.calls));
                }
                Err(panic) => {
                    let last = recorder.and_then(|it| it.last);
                    resume_unwind(Box::new(Failure::new(last, &*panic)));
                }
            }
            scope.complete([], [])
        })
    }));
    let graph = match captured {
        Ok(Ok(graph)) => graph,
        Ok(Err(error)) => return Err(RecordError::Graph(error.to_string())),
        Err(panic) => match panic.downcast::<Failure>() {
            Ok(failure) => return Err(failure.0),
            Err(panic) => resume_unwind(panic),
        },
    };
    let (Some(value), Some((events, calls))) = (result, recorded) else {
        unreachable!("the body returned")
    };
    let steps = graph.graph.operations.into_iter();
    let steps = steps.map(|operation| match event_number(&operation) {
        Some(number) => events[number].clone(),
        None => RecordedStep::Operation(operation),
    });
    Ok((
        value,
        Recording {
            steps: steps.collect(),
            calls,
            values: graph.values,
        },
    ))
}

/// The panic value of a body whose operation could not be recorded.
struct Failure(RecordError);

impl Failure {
    fn new(operation: Option<String>, panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self(RecordError::NoShapes {
            operation: operation.unwrap_or_else(|| "an operation of the model".into()),
            reason: text.unwrap_or_else(|| "it failed".into()),
        })
    }
}

fn handle(device: &Device) -> Primitive {
    match Tensor::<1>::empty([1], device).into_dispatch().kind {
        DispatchTensorKind::Capture(tensor) => primitive(tensor),
        other => unreachable!("the device records, and made {other:?}"),
    }
}

/// Returns the primitive tensor. Floats, integers and booleans have the same primitive type on this backend.
fn primitive(tensor: BackendTensor<Capture>) -> Primitive {
    match tensor {
        BackendTensor::Float(tensor) | BackendTensor::Int(tensor) | BackendTensor::Bool(tensor) => {
            tensor
        }
        other => panic!("a {} tensor is not recorded", other.name()),
    }
}

fn wrap(dtype: DType, tensor: Primitive) -> DispatchTensor {
    let tensor = match dtype {
        DType::Bool(_) => BackendTensor::Bool(tensor),
        dtype if dtype.is_float() => BackendTensor::Float(tensor),
        _ => BackendTensor::Int(tensor),
    };
    DispatchTensor {
        kind: DispatchTensorKind::Capture(tensor),
        autodiff: DispatchAutodiffContext::Disabled,
    }
}

/// Returns the description of a recorded tensor, or `None` for a tensor on another device.
fn described(tensor: &DispatchTensor) -> Option<TensorIr> {
    match &tensor.kind {
        DispatchTensorKind::Capture(tensor) => Some(primitive(tensor.clone()).into_ir()),
        _ => None,
    }
}

/// Returns the identifier of a tensor in the recording, or `None` if the tensor is not on the recording device.
pub fn tensor_id<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Option<TensorId> {
    described(&tensor.clone().into_dispatch()).map(|it| it.id)
}

fn all_described(tensors: &[DispatchTensor]) -> Vec<TensorIr> {
    tensors.iter().filter_map(described).collect()
}

fn event_number(operation: &OperationIr) -> Option<usize> {
    match operation {
        OperationIr::Custom(custom) if custom.id == EVENT => match custom.scalars.first() {
            Some(ScalarIr::UInt(number)) => Some(*number as usize),
            _ => None,
        },
        _ => None,
    }
}

impl Recorder {
    pub(super) fn push(&mut self, step: RecordedStep) {
        let number = ScalarIr::UInt(self.events.len() as u64);
        self.events.push(step);
        self.handle
            .client
            .register_op(OperationIr::Custom(CustomOpIr {
                id: EVENT.into(),
                inputs: vec![],
                outputs: vec![],
                scalars: vec![number],
            }));
    }
}

/// Returns the outputs of a kernel. They have the shapes that the kernel declares, but no values.
pub(crate) fn launch_on_shapes(
    kernel: &dyn DeviceOp,
    inputs: Vec<DispatchTensor>,
    outputs: Vec<Spec>,
) -> Vec<DispatchTensor> {
    let inputs = inputs.into_iter().map(|tensor| match tensor.kind {
        DispatchTensorKind::Capture(tensor) => primitive(tensor),
        other => panic!(
            "{}: one tensor is recorded, another is {other:?}: expected one device",
            kernel.name()
        ),
    });
    let inputs: Vec<Primitive> = inputs.collect();
    let client = inputs[0].client.clone();
    let output = |Spec { shape, dtype }: Spec| {
        RouterTensor::new(client.create_empty_handle(), shape, dtype, client.clone())
    };
    let outputs: Vec<Primitive> = outputs.into_iter().map(output).collect();
    client.register_op(OperationIr::Custom(CustomOpIr {
        id: kernel.name().into(),
        inputs: inputs.into_iter().map(RouterTensor::into_ir).collect(),
        outputs: outputs.iter().map(created).collect(),
        scalars: kernel
            .in_place()
            .map_or(vec![], |InPlace { input, output }| {
                [input, output].map(|it| ScalarIr::UInt(it as u64)).to_vec()
            }),
    }));
    let wrapped = outputs.into_iter().map(|tensor| {
        use burn::backend::TensorMetadata;
        wrap(tensor.dtype(), tensor)
    });
    wrapped.collect()
}

/// Returns the description of a tensor as the output of the operation that creates it.
fn created(tensor: &Primitive) -> TensorIr {
    use burn::backend::TensorMetadata;
    TensorIr::uninit(tensor.id(), tensor.shape(), tensor.dtype())
}

/// Returns the input of a recorded kernel that is updated in place, and the output that replaces the input. Returns
/// `None` if the kernel updates no input in place. The update is in place only if no other tensor uses the memory of
/// the input.
pub fn in_place(kernel: &CustomOpIr) -> Option<(&TensorIr, &TensorIr)> {
    let [ScalarIr::UInt(input), ScalarIr::UInt(output)] = kernel.scalars[..] else {
        return None;
    };
    let input = kernel.inputs.get(input as usize)?;
    Some((input, kernel.outputs.get(output as usize)?))
}

/// Runs and records the forward pass of a function.
pub(crate) fn run_function(inputs: Vec<Primitive>, function: SharedFunction) -> Vec<Primitive> {
    let described: Vec<TensorIr> = inputs.iter().map(|it| it.clone().into_ir()).collect();
    let name = function.name();
    let call = with(|recorder| {
        let call = recorder.calls.len();
        recorder.calls.push(RecordedCall {
            name: name.clone(),
            inputs: described,
            saved: vec![],
            outputs: vec![],
            gradients: None,
            function: function.clone(),
        });
        recorder.backwards.push(None);
        recorder.last = Some(name.clone());
        recorder.push(RecordedStep::Forward(call));
        recorder.inside.push(call);
        call
    });
    let (outputs, saved) = forward::<Capture>(inputs, &function);
    let Some(call) = call else {
        return outputs;
    };
    let made = outputs.iter().map(|it| it.clone().into_ir()).collect();
    with(|recorder| {
        recorder.inside.pop();
        recorder.last = Some(name);
        let described = all_described(&saved);
        let of = &mut recorder.calls[call];
        (of.saved, of.outputs) = (described, made);
        if recorder.inside.is_empty() {
            recorder.backwards[call] = Some((function, saved));
        }
        recorder.push(RecordedStep::ForwardEnd(call));
    });
    outputs
}

pub(super) fn run_backward(call: usize, needed: &[bool]) {
    let taken = with(|recorder| {
        let taken = recorder.backwards.get_mut(call).and_then(Option::take);
        let outputs = recorder.calls.get(call).map(|it| it.outputs.clone());
        let client = recorder.handle.client.clone();
        let first = recorder.first_variable.map_or(0, |first| first.value());
        let inputs = recorder.calls.get(call).map(|it| &it.inputs[..]);
        let is_variable = inputs.unwrap_or_default().iter();
        let is_variable = is_variable.map(|input| input.id.value() >= first);
        let needed = needed.iter().zip(is_variable);
        let needed: Vec<_> = needed.map(|(needed, is)| *needed && is).collect();
        taken
            .zip(outputs)
            .inspect(|_| {
                let name = recorder.calls[call].name.clone();
                recorder.last = Some(format!("the backward of {name}"));
                recorder.push(RecordedStep::Backward(call));
                recorder.inside.push(call);
            })
            .map(|it| (it, client, needed))
    });
    let Some(Some((((function, saved), outputs), client, needed))) = taken else {
        return;
    };
    // The gradients of the outputs are recorded as created here. In a real backward pass, the operations that use the
    // outputs compute them.
    let gradient = |ir: &TensorIr| {
        let tensor = RouterTensor::new(
            client.create_empty_handle(),
            ir.shape.clone(),
            ir.dtype,
            client.clone(),
        );
        client.register_op(OperationIr::Custom(CustomOpIr {
            id: "gradient".into(),
            inputs: vec![],
            outputs: vec![created(&tensor)],
            scalars: vec![],
        }));
        tensor
    };
    let of_outputs: Vec<Primitive> = outputs.iter().map(gradient).collect();
    let described_outputs = of_outputs.iter().map(created).collect();
    let wrapped = of_outputs.into_iter();
    let wrapped = wrapped.map(|it| Some(wrap(DType::F32, it))).collect();
    let inputs = function.0.backward(saved, wrapped, &needed);
    let inputs = inputs
        .iter()
        .map(|it| it.as_ref().and_then(described))
        .collect();
    with(|recorder| {
        recorder.calls[call].gradients = Some(RecordedGradients {
            outputs: described_outputs,
            inputs,
        });
        recorder.inside.pop();
        recorder.push(RecordedStep::BackwardEnd(call));
    });
}
